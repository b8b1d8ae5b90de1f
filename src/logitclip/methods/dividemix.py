"""DivideMix (Li et al., 2020): two networks select the labels to trust for each other."""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from logitclip.clip import check_positive
from logitclip.data import DATASETS, batches
from logitclip.losses import check_at_least
from logitclip.methods import METHODS
from logitclip.methods.base import Augment, Batch, Job, State, Step
from logitclip.methods.two_networks import TwoNetworks
from logitclip.noise import NOISES
from logitclip.rng import derived_seed, stream
from logitclip.text import explain_missing

log = logging.getLogger(__name__)

# Published weight of the unsupervised term for each rate of symmetric noise.
LAMBDA_U = {"cifar10": {0.2: 0.0, 0.5: 25.0, 0.8: 25.0, 0.9: 50.0}, "cifar100": {0.2: 25.0, 0.5: 150.0}}


# Revision 1: the guesses are made before the labels are refined, as in the authors' code, which batch norm notices.
@partial(METHODS.register, name="dividemix", revision=1)
class DivideMix(TwoNetworks):
    """DivideMix: split the examples by their loss, and train semi-supervised.

    After `warm_up` epochs a mixture of two Gaussians is fitted to the losses of each network. The other network trains
    on the examples of the lower component (probability above `p_threshold`) with their labels, and on the rest with
    guessed labels. The prediction is the sum of both networks' logits. The defaults of the knobs depend on the dataset
    and the noise: see `preset`.

    A batch has `batch_size` labelled and as many unlabelled examples, and twice `batch_size` examples in the warm-up.
    The authors use 64 (the 128 of their paper is 64 + 64), 301 epochs, and lr 0.02, divided by 10 from epoch 150 on.

    The LogitClip paper clips "all the model outputs during training"; each place has a switch. A clip with a small
    scale makes guessed labels nearly uniform: with scale 0.4 and 10 classes no probability exceeds 0.145, and
    sharpening only squares that.
    """

    losses = ("ce",)

    def __init__(
        self,
        job: Job,
        *,
        warm_up: int = 10,
        lambda_u: float = 25.0,
        p_threshold: float = 0.5,
        temperature: float = 0.5,
        alpha: float = 4.0,
        views: int = 2,
        ramp: float = 16.0,
        loss_window: int = 1,
        confidence_penalty: bool = False,
        clip_warm_up: bool = True,
        clip_guesses: bool = True,
        clip_mixed: bool = True,
        clip_mixture: bool = True,
    ) -> None:
        """
        Args:
            warm_up: Epochs of plain training on all labels.
            lambda_u: Final weight of the unsupervised term.
            p_threshold: Probability of a clean label above which an example is labelled.
            temperature: Sharpens guessed labels, `p^(1/temperature)`.
            alpha: Parameter of the Beta distribution for mixing examples.
            views: Augmented views of each example (M).
            ramp: Epochs after the warm-up until the unsupervised term has its full weight.
            loss_window: Epochs over which losses are averaged before the split.
            confidence_penalty: Penalise confident predictions in the warm-up; meant for asymmetric noise.
            clip_warm_up: Clip the logits of the warm-up loss.
            clip_guesses: Clip the logits behind guessed and refined labels.
            clip_mixed: Clip the logits of mixed examples.
            clip_mixture: Clip the logits behind the losses that are split.
        """
        check_at_least(0, warm_up=warm_up, lambda_u=lambda_u)
        check_at_least(1, views=views, loss_window=loss_window)
        for name, value in (("temperature", temperature), ("alpha", alpha), ("ramp", ramp)):
            check_positive(name, value)
        if not 0 < p_threshold < 1:
            raise ValueError(f"p_threshold must lie between 0 and 1, got {p_threshold}.")
        if job.train.labels.is_floating_point():
            raise ValueError("dividemix needs class labels, not soft ones: it decides which labels are wrong.")
        super().__init__(job)
        if warm_up >= self.settings.epochs:
            log.warning("All %d epochs are warm-up: nothing is divided or mixed. Lower warm_up.", self.settings.epochs)
        self.warm_up, self.lambda_u, self.p_threshold, self.temperature = warm_up, lambda_u, p_threshold, temperature
        self.alpha, self.views, self.ramp, self.loss_window = alpha, views, ramp, loss_window
        self.confidence_penalty, self.clip_warm_up, self.clip_guesses = confidence_penalty, clip_warm_up, clip_guesses
        self.clip_mixed, self.clip_mixture = clip_mixed, clip_mixture
        self.history: list[list[Tensor]] = [[], []]  # scaled losses of the last epochs, for each network

    @staticmethod
    def preset(data: str, noise: str) -> dict[str, float]:
        """Return the published settings for a dataset and a noise.

        cifar100 and webvision have their own settings; all other datasets use those of CIFAR-10. Symmetric noise uses
        the published table at the nearest rate; asymmetric noise lambda_u = 0 and the confidence penalty. Nothing is
        published for instance-dependent, human and other noise. They are structured like asymmetric noise, where a
        large lambda_u hurts, so we use lambda_u = 0, without the penalty.

        >>> DivideMix.preset("cifar10", "symmetric:rate=0.5")["lambda_u"]
        25.0
        """
        kind, knobs = NOISES.parse(noise)
        name = DATASETS.parse(data)[0]
        table = LAMBDA_U["cifar100" if name == "cifar100" else "cifar10"]
        rate = knobs["rate"] if kind == "symmetric" else 0.0
        return {
            "warm_up": {"cifar100": 30, "webvision": 1}.get(name, 10),
            "lambda_u": table[min(table, key=lambda known: abs(known - rate))] if kind == "symmetric" else 0.0,
            "alpha": 0.5 if name == "webvision" else 4.0,
            "p_threshold": 0.6 if rate >= 0.9 else 0.5,
            "loss_window": 5 if rate >= 0.9 else 1,
            "confidence_penalty": kind in ("asymmetric", "pair"),
        }

    def train_epoch(
        self, epoch: int, batches: Iterable[Batch], augment: Augment
    ) -> Iterator[tuple[Tensor, Tensor, Step]]:
        if epoch < self.warm_up:
            for number in (0, 1):
                yield from self._warm_up(number, epoch, augment)
            return
        clean = [self.clean_probability(number, epoch) for number in (0, 1)]
        for number in (0, 1):  # each network trains on the split of the other
            yield from self._semi_supervised(number, clean[1 - number], epoch, augment)

    def _warm_up(self, number: int, epoch: int, augment: Augment) -> Iterator[tuple[Tensor, Tensor, Step]]:
        """Train one network on all labels, with cross entropy."""
        network, model, optimizer = self.nets[number]
        network.train()
        for index, x, y in self._order(self.job.index, 2 * self.settings.batch_size, epoch, f"warm-up {number}"):
            logits = model(augment(x))
            linked = self._apply_link(logits, self.clip_warm_up)
            loss = cross_entropy(linked, y)
            if self.confidence_penalty:
                loss = loss + negative_entropy(linked)
            loss = self.add_penalty(loss, logits)
            self.minimise(loss, model, optimizer)
            yield index, y, Step(loss.detach(), logits.detach())

    def _semi_supervised(
        self, number: int, clean: Tensor, epoch: int, augment: Augment
    ) -> Iterator[tuple[Tensor, Tensor, Step]]:
        """Train one network on the labels that the other believes, and on guesses for the rest (MixMatch)."""
        (network, model, optimizer), (other_network, other, _) = self.nets[number], self.nets[1 - number]
        network.train()
        other_network.eval()
        size, seed = self.settings.batch_size, self.settings.seed
        believed = (clean > self.p_threshold).cpu()
        if not believed.any():  # train on all labels, weighted by their probability
            believed[:] = True
        labelled, rest = self.job.index[believed], self.job.index[~believed]
        probability = torch.zeros(len(self.job.train), device=self.fabric.device)  # by position in the dataset
        probability[self.job.index.to(probability.device)] = clean
        turns = (self._order(rest, size, epoch, f"unlabelled {number} {turn}") for turn in itertools.count())
        unlabelled = itertools.chain.from_iterable(turns)
        weights = np.random.default_rng(derived_seed(seed, "mix", epoch, number))
        orders = stream("cpu", seed, "mixing order", epoch, number)
        steps = len(labelled) // size + 1
        for i, (index, x, y) in enumerate(self._order(labelled, size, epoch, f"labelled {number}")):
            views = [augment(x) for _ in range(self.views)]
            more: list[Tensor] = []
            if len(rest):
                _, x, _ = next(unlabelled)
                more = [augment(x) for _ in range(self.views)]
            with torch.no_grad():
                # The authors' code makes the guesses first. Each pass in train mode moves batch norm's statistics.
                guess = self._mean_softmax([net(view) for net in (model, other) for view in more]) if more else None
                logits = [model(view) for view in views]
                given = one_hot(y, self.job.num_classes)
                targets = refine_labels(given, probability[index], self._mean_softmax(logits), self.temperature)
                targets = [targets] * self.views
                if guess is not None:
                    targets += [sharpen(guess, self.temperature)] * self.views
                inputs, target = torch.cat(views + more), torch.cat(targets)
                order = torch.randperm(len(inputs), generator=orders).to(inputs.device)
                inputs, target = mix_up(inputs, target, weights.beta(self.alpha, self.alpha), order)
            output = model(inputs)
            supervised, unsupervised, uneven = mixmatch_losses(
                self._apply_link(output, self.clip_mixed), target, self.views * len(y)
            )
            loss = supervised + self.unsupervised_weight(epoch + i / steps) * unsupervised + uneven
            loss = self.add_penalty(loss, output)
            self.minimise(loss, model, optimizer)
            yield index, y, Step(loss.detach(), logits[0])

    @torch.no_grad()
    def clean_probability(self, number: int, epoch: int) -> Tensor:
        """Return the probability [N] that each training label is right, by the losses of one network."""
        network, model, _ = self.nets[number]
        network.eval()
        losses = []
        for _, x, y in batches(
            self.job.train, 512, index=self.job.index, workers=self.settings.workers, device=self.fabric.device
        ):
            logits = self._apply_link(model(self.job.view(x, None)), self.clip_mixture)
            losses.append(cross_entropy(logits, y, reduction="none").double())
        loss = torch.cat(losses).cpu()
        low, high = loss.aminmax()
        scaled = (loss - low) / (high - low).clamp_min(1e-12)
        self.history[number] = [*self.history[number], scaled][-self.loss_window :]
        seed = derived_seed(self.settings.seed, "mixture", epoch, number) % 2**32
        clean = lower_of_two(torch.stack(self.history[number]).mean(0), seed)
        return clean.float().to(self.fabric.device)

    def unsupervised_weight(self, epoch: float) -> float:
        """Return lambda_u, ramped up linearly after the warm-up; `epoch` may be fractional."""
        return self.lambda_u * min(max((epoch - self.warm_up) / self.ramp, 0.0), 1.0)

    def predict(self, x: Tensor) -> Tensor:
        """Return the sum of both networks' logits, never clipped."""
        for network, _, _ in self.nets:
            network.eval()
        return self.nets[0][1](x) + self.nets[1][1](x)

    def state_dict(self) -> State:
        return {**super().state_dict(), "history": self.history}

    def load(self, weights: dict[str, Tensor], state: State) -> None:
        super().load(weights, state)
        self.history = state["history"]

    def _order(self, index: Tensor, size: int, epoch: int, purpose: str) -> Iterator[Batch]:
        """Return shuffled batches of the examples at `index`, none of a single one: batch norm cannot train on it."""
        if len(index) == 1:
            index = index.repeat(2)
        incomplete = self.settings.drop_last or len(index) % size == 1
        return batches(
            self.job.train,
            size,
            index=index,
            generator=stream("cpu", self.settings.seed, purpose, epoch),
            drop_last=incomplete and len(index) >= size,  # a part may be smaller than a batch
            workers=self.settings.workers,
            device=self.fabric.device,
        )

    def _apply_link(self, logits: Tensor, clip: bool) -> Tensor:
        return self.criterion.link(logits) if clip else logits  # type: ignore[operator]

    def _mean_softmax(self, logits: list[Tensor]) -> Tensor:
        return torch.stack([self._apply_link(z, self.clip_guesses).softmax(1) for z in logits]).mean(0)


def lower_of_two(values: Tensor, seed: int) -> Tensor:
    """Fit two Gaussians to `values` [N]; returns the probability [N] of the one with the lower mean."""
    with explain_missing("The mixture of DivideMix needs scikit-learn", "train"):
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.mixture import GaussianMixture
    column = values[:, None].numpy()
    mixture = GaussianMixture(2, max_iter=10, tol=1e-2, reg_covar=5e-4, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the method stops after ten iterations
        mixture.fit(column)
    lower = int(np.asarray(mixture.means_).argmin())
    return torch.from_numpy(mixture.predict_proba(column)[:, lower])


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """Return `p^(1/T)`, normalised.

    >>> sharpen(torch.tensor([[0.6, 0.4]]), 0.5)
    tensor([[0.6923, 0.3077]])
    """
    p = p ** (1 / temperature)
    return p / p.sum(1, keepdim=True)


def refine_labels(given: Tensor, clean: Tensor, p: Tensor, temperature: float) -> Tensor:
    """Return `w y + (1-w) p`, sharpened: w [N] is the probability of a clean label, y and p are [N, K].

    >>> refine_labels(torch.tensor([[0, 1]]), torch.tensor([0.5]), torch.tensor([[0.5, 0.5]]), 1.0)
    tensor([[0.2500, 0.7500]])
    """
    return sharpen(clean[:, None] * given + (1 - clean[:, None]) * p, temperature)


def mix_up(x: Tensor, target: Tensor, weight: float, order: Tensor) -> tuple[Tensor, Tensor]:
    """Mix each example with another one; its own weight is the larger of `weight` and `1 - weight`."""
    own = max(weight, 1 - weight)
    return own * x + (1 - own) * x[order], own * target + (1 - own) * target[order]


def negative_entropy(logits: Tensor) -> Tensor:
    """Return the mean of `sum_k p_k log p_k`."""
    log_p = logits.log_softmax(1)
    return (log_p.exp() * log_p).sum(1).mean()


def mixmatch_losses(logits: Tensor, target: Tensor, labelled: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three terms of MixMatch's loss.

    Args:
        logits: [N, K].
        target: [N, K], probabilities.
        labelled: Number of labelled rows, which come first.

    Returns:
        Cross entropy of the labelled rows, squared error of the others, and the divergence of the mean prediction from
        uniform, `sum_k 1/K log((1/K) / mean p_k)`.
    """
    log_p = logits.log_softmax(1)
    supervised = -(target[:labelled] * log_p[:labelled]).sum(1).mean()
    difference = log_p[labelled:].exp() - target[labelled:]
    unsupervised = difference.square().mean() if len(difference) else difference.sum()
    n, k = logits.shape
    uneven = math.log(n / k) - log_p.logsumexp(0).mean()  # the mean over classes of log(1/K) - log(mean p_k)
    return supervised, unsupervised, uneven

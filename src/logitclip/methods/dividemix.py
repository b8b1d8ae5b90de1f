"""DivideMix: two networks, each of which tells the other which labels to believe."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from logitclip.data.loading import batches
from logitclip.methods import METHODS
from logitclip.methods.standard import Augment, Batch, Job, Step, derived_seed, standard, stream

# The weight of the unsupervised term, by rate of symmetric noise, as published for CIFAR-10 and CIFAR-100.
LAMBDA_U = {"few classes": {0.2: 0.0, 0.5: 25.0, 0.8: 25.0, 0.9: 50.0}, "many classes": {0.2: 25.0, 0.5: 150.0}}
MANY_CLASSES = ("cifar100", "webvision")


@METHODS.register
class dividemix(standard):
    """DivideMix: split the examples by their loss, and train on both parts as in semi-supervised learning.

    After `warm_up` epochs each network's losses are fitted by two Gaussians. The other network trains on the examples
    of the lower one (probability above `p_threshold`) with their labels, and on the rest with guessed labels. Knobs
    that are not given follow the dataset and the noise: see `preset`. Batches of the warm-up are twice `batch_size`,
    as in the released code.

    The paper of LogitClip clips "all the model outputs during training"; each place can be switched off by itself. Mind
    that a clip of a small scale makes guessed labels nearly uniform: with scale 0.4 and 10 classes no probability
    exceeds 0.145, and sharpening only squares that.
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
            warm_up: epochs of plain training on all labels.
            lambda_u: final weight of the unsupervised term.
            p_threshold: least probability of a label that is believed.
            temperature: sharpens guessed labels, `p^(1/temperature)`.
            alpha: of the Beta distribution that mixes examples.
            views: augmented views of each example (M).
            ramp: epochs after the warm-up in which the unsupervised term reaches its weight.
            loss_window: epochs over which the losses are averaged before they are split.
            confidence_penalty: in the warm-up, punish confident predictions; meant for asymmetric noise.
            clip_warm_up, clip_guesses, clip_mixed, clip_mixture: where the clip acts: the warm-up's loss, the guessed
                and refined labels, the logits of mixed examples, the losses that are split.
        """
        for name, value, least in (("warm_up", warm_up, 0), ("views", views, 1), ("loss_window", loss_window, 1)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")
        for name, value in (("temperature", temperature), ("alpha", alpha), ("ramp", ramp)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}.")
        if not 0 < p_threshold < 1 or lambda_u < 0:
            raise ValueError(f"p_threshold must lie in (0, 1) and lambda_u be >= 0, got {p_threshold} and {lambda_u}.")
        if job.fabric.world_size > 1:
            raise ValueError("dividemix trains in one process; its two networks cannot be spread over devices.")
        if job.train.labels.is_floating_point():
            raise ValueError("dividemix needs class labels, not soft ones.")
        super().__init__(job)
        self.warm_up, self.lambda_u, self.p_threshold, self.temperature = warm_up, lambda_u, p_threshold, temperature
        self.alpha, self.views, self.ramp, self.loss_window = alpha, views, ramp, loss_window
        self.confidence_penalty, self.clip_warm_up, self.clip_guesses = confidence_penalty, clip_warm_up, clip_guesses
        self.clip_mixed, self.clip_mixture = clip_mixed, clip_mixture
        second = self.set_up(derived_seed(self.settings.seed, "second network") % 2**31)
        self.nets = [(self.network, self.model, self.optimizer), second]
        self.history: list[list[Tensor]] = [[], []]  # of each network, the losses of the last epochs

    @staticmethod
    def preset(data: str, noise: str) -> dict[str, Any]:
        """The published settings for a dataset and a noise.

        Symmetric noise: the published table, at the nearest rate. Asymmetric noise: lambda_u = 0 and the confidence
        penalty. Instance-dependent and human noise have no published setting; they are structured like asymmetric
        noise, where a large lambda_u is known to hurt, so lambda_u = 0 is our choice, without the penalty.
        """
        many = data.partition(":")[0] in MANY_CLASSES
        kind, _, knobs = noise.partition(":")
        given = dict(item.split("=") for item in knobs.split(",") if item.startswith("rate="))
        rate = float(given.get("rate", 0.5))
        table = LAMBDA_U["many classes" if many else "few classes"]
        nearest = min(table, key=lambda known: abs(known - rate))
        return {
            "warm_up": 30 if many else 10,
            "lambda_u": table[nearest] if kind == "symmetric" else 0.0,
            "p_threshold": 0.6 if kind == "symmetric" and rate >= 0.9 else 0.5,
            "loss_window": 5 if kind == "symmetric" and rate >= 0.9 else 1,
            "confidence_penalty": kind in ("asymmetric", "pair"),
        }

    def optimizers(self) -> list[Any]:
        return [optimizer for _, _, optimizer in self.nets]

    def train_epoch(
        self, epoch: int, batches: Iterable[Batch], augment: Augment
    ) -> Iterator[tuple[Tensor, Tensor, Step]]:
        if epoch < self.warm_up:
            for number, net in enumerate(self.nets):
                yield from self._warm_up(net, self._order(epoch, f"warm-up {number}", 2), augment)
            return
        clean = [self.clean_probability(number, epoch) for number in (0, 1)]
        for number, net in enumerate(self.nets):
            # Each network is told by the other one which labels to believe.
            yield from self._semi_supervised(number, net, self.nets[1 - number][1], clean[1 - number], epoch, augment)

    def _warm_up(
        self, net: tuple[nn.Module, Any, Any], order: Iterable[Batch], augment: Augment
    ) -> Iterator[tuple[Tensor, Tensor, Step]]:
        network, model, optimizer = net
        network.train()
        for index, x, y in order:
            logits = model(augment(x))
            linked = self._linked(logits, self.clip_warm_up)
            loss = torch.nn.functional.cross_entropy(linked, y)
            if self.confidence_penalty:
                loss = loss + negative_entropy(linked)
            self._step(loss, model, optimizer)
            yield index, y, Step(loss.detach(), logits.detach())

    def _semi_supervised(
        self, number: int, net: tuple[nn.Module, Any, Any], other: Any, clean: Tensor, epoch: int, augment: Augment
    ) -> Iterator[tuple[Tensor, Tensor, Step]]:
        network, model, optimizer = net
        network.train()
        self.nets[1 - number][0].eval()
        index, believed = self.job.index, (clean > self.p_threshold).cpu()
        if not believed.any() or believed.all():  # no split: every label counts as far as it is believed
            believed = torch.ones_like(believed)
        labelled, rest = index[believed], index[~believed]
        probability = torch.zeros(len(self.job.train), device=self.fabric.device)
        probability[index.to(probability.device)] = clean
        size = self.settings.batch_size
        steps = -(-len(labelled) // size)
        unlabelled = itertools.chain.from_iterable(
            self._order(epoch, f"unlabelled {number} {turn}", 1, rest) for turn in itertools.count()
        )
        rng = np.random.default_rng(derived_seed(self.settings.seed, "mix", epoch, number))
        shuffle = stream("cpu", self.settings.seed, "mixing order", epoch, number)
        for i, (at, x, y) in enumerate(self._order(epoch, f"labelled {number}", 1, labelled)):
            views = [augment(x) for _ in range(self.views)]
            with torch.no_grad():
                logits = [model(view) for view in views]
                p = self._mean_softmax(logits)
                one_hot = torch.nn.functional.one_hot(y, self.job.num_classes).to(p.dtype)
                w = probability[at][:, None]
                targets = [sharpen(w * one_hot + (1 - w) * p, self.temperature)] * self.views
                if len(rest):
                    _, x_u, _ = next(unlabelled)
                    views_u = [augment(x_u) for _ in range(self.views)]
                    guesses = [net(view) for view in views_u for net in (model, other)]
                    targets += [sharpen(self._mean_softmax(guesses), self.temperature)] * self.views
                    views += views_u
                inputs, target = torch.cat(views), torch.cat(targets)
                mix = rng.beta(self.alpha, self.alpha)
                mix = max(mix, 1 - mix)
                order = torch.randperm(len(inputs), generator=shuffle).to(inputs.device)
                inputs = mix * inputs + (1 - mix) * inputs[order]
                target = mix * target + (1 - mix) * target[order]
            mixed = self._linked(model(inputs), self.clip_mixed)
            weight = self.unsupervised_weight(epoch + i / steps)
            supervised, unsupervised, penalty = mixmatch_losses(mixed, target, self.views * len(x))
            loss = supervised + weight * unsupervised + penalty
            self._step(loss, model, optimizer)
            yield at, y, Step(loss.detach(), logits[0])

    @torch.no_grad()
    def clean_probability(self, number: int, epoch: int) -> Tensor:
        """How probable each label of the training examples is, by the losses of network `number`, [N]."""
        from sklearn.mixture import GaussianMixture

        network, model, _ = self.nets[number]
        network.eval()
        losses = []
        for _, x, y in batches(self.job.train, 512, index=self.job.index, device=self.fabric.device):
            logits = self._linked(model(self.job.view(x, None)), self.clip_mixture)
            losses.append(torch.nn.functional.cross_entropy(logits, y, reduction="none").double().cpu())
        loss = torch.cat(losses)
        low, high = loss.aminmax()
        self.history[number] = [*self.history[number], (loss - low) / (high - low).clamp_min(1e-12)][
            -self.loss_window :
        ]
        values = torch.stack(self.history[number]).mean(0)[:, None].numpy()
        mixture = GaussianMixture(
            2,
            max_iter=10,
            tol=1e-2,
            reg_covar=5e-4,
            random_state=derived_seed(self.settings.seed, "mixture", epoch) % 2**31,
        ).fit(values)
        small = int(mixture.means_.argmin())
        return torch.from_numpy(mixture.predict_proba(values)[:, small]).float().to(self.fabric.device)

    def unsupervised_weight(self, epoch: float) -> float:
        """lambda_u, ramped up linearly after the warm-up; `epoch` may be fractional."""
        return self.lambda_u * min(max((epoch - self.warm_up) / self.ramp, 0.0), 1.0)

    def predict(self, x: Tensor) -> Tensor:
        """The sum of both networks' logits."""
        for network, _, _ in self.nets:
            network.eval()
        return self.nets[0][1](x) + self.nets[1][1](x)

    def weights(self) -> dict[str, Tensor]:
        return {f"net{i}.{k}": v for i, net in enumerate(self.nets, 1) for k, v in net[0].state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers()]
        return {**super().state_dict(), "optimizers": optimizers, "history": self.history}

    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        for i, (network, _, optimizer) in enumerate(self.nets, 1):
            prefix = f"net{i}."
            network.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
            optimizer.load_state_dict(state["optimizers"][i - 1])
        self.history = state["history"]

    def _order(self, epoch: int, purpose: str, times: int, index: Tensor | None = None) -> Iterator[Batch]:
        """Shuffled batches of `times` the batch size."""
        return batches(
            self.job.train,
            times * self.settings.batch_size,
            index=self.job.index if index is None else index,
            generator=stream("cpu", self.settings.seed, purpose, epoch),
            workers=self.settings.workers,
            device=self.fabric.device,
        )

    def _linked(self, logits: Tensor, clip: bool) -> Tensor:
        return self.criterion.link(logits) if clip else logits  # type: ignore[operator]

    def _mean_softmax(self, logits: list[Tensor]) -> Tensor:
        return torch.stack([self._linked(z, self.clip_guesses).softmax(1) for z in logits]).mean(0)

    def _step(self, loss: Tensor, model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.fabric.backward(loss)
        self.update(model, optimizer)


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """`p^(1/T)`, normalised.

    >>> sharpen(torch.tensor([[0.6, 0.4]]), 0.5)
    tensor([[0.6923, 0.3077]])
    """
    p = p ** (1 / temperature)
    return p / p.sum(1, keepdim=True)


def negative_entropy(logits: Tensor) -> Tensor:
    """The mean of `sum_k p_k log p_k`."""
    log_p = logits.log_softmax(1)
    return (log_p.exp() * log_p).sum(1).mean()


def mixmatch_losses(logits: Tensor, target: Tensor, labelled: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy of the first `labelled` rows, squared error of the others, and the distance of the mean prediction
    from uniform, `sum_k 1/K log((1/K) / mean p_k)`."""
    log_p = logits.log_softmax(1)
    supervised = -(target[:labelled] * log_p[:labelled]).sum(1).mean()
    difference = log_p[labelled:].exp() - target[labelled:]
    unsupervised = difference.square().mean() if len(difference) else difference.sum()
    k = logits.shape[1]
    return supervised, unsupervised, (log_p.exp().mean(0).log() + np.log(k)).mean().neg()

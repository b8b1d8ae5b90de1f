"""What methods with two networks share: making, saving and restoring both."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from logitclip.criterion import Linked
from logitclip.methods.base import Job, State
from logitclip.methods.standard import Standard
from logitclip.rng import derived_seed


class TwoNetworks(Standard):
    """Two networks of the same kind with different weights, each with its optimiser, in `nets`."""

    distributed = False

    def __init__(self, job: Job) -> None:
        criterion = job.criterion
        if isinstance(criterion, Linked) and criterion.needs_head():
            raise ValueError(
                f"The clip of this criterion needs the last layer of one network, and {type(self).__name__} trains "
                "two: take another clip."
            )
        super().__init__(job)
        second = self.set_up(derived_seed(self.settings.seed, "second network") % 2**31)
        if second[0] is self.network:
            name = type(self).__name__
            raise ValueError(f"{name} trains two networks: give a function that makes one from a seed.")
        self.nets = [(self.network, self.model, self.optimizer), second]

    def optimizers(self) -> list[Optimizer]:
        return [optimizer for _, _, optimizer in self.nets]

    def weights(self) -> dict[str, Tensor]:
        return {f"net{i}.{k}": v for i, net in enumerate(self.nets, 1) for k, v in net[0].state_dict().items()}

    def state_dict(self) -> State:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers()]}

    def load(self, weights: dict[str, Tensor], state: State) -> None:
        for i, (network, _, optimizer) in enumerate(self.nets, 1):
            prefix = f"net{i}."
            network.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
            optimizer.load_state_dict(state["optimizers"][i - 1])

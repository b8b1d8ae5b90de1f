"""ClipMonitor in the real Trainer."""

import logging

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import logitclip as lc
from logitclip.integrations.lightning import ClipMonitor

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    def __init__(self, criterion, weight):
        super().__init__()
        self.criterion, self.seen = criterion, []
        self.network = nn.Linear(2, 3, bias=False)
        self.network.weight.data = weight.clone()

    def training_step(self, batch, _):
        x, y, _ = batch
        logits = self.network(x)
        self.seen.append(logits.detach())
        return self.criterion(logits, y)

    def validation_step(self, batch, _):
        x, y, _ = batch
        self.criterion(100 * self.network(x), y)  # must not be counted

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def data():
    g = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(40, 2, generator=g)
    truth = torch.randint(3, (40,), generator=g)
    noisy = torch.where(torch.rand(40, generator=g) < 0.4, (truth + 1) % 3, truth)
    return x, noisy, truth


def fitted(criterion, data, **options):
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    model = Classifier(criterion, weight)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, callbacks=[ClipMonitor(**options)],
    )  # fmt: skip
    loader = DataLoader(TensorDataset(*data), batch_size=16)
    trainer.fit(model, loader, loader)
    logged = {k.removeprefix("logitclip/"): float(v) for k, v in trainer.callback_metrics.items()}
    return model, logged


def test_what_is_logged_is_what_the_criterion_saw(data):
    model, logged = fitted(lc.LogitClip("ce", tau=3.0), data, true_labels=lambda batch: batch[2])
    logits, (_, noisy, truth) = torch.cat(model.seen), data
    norms, predicted, wrong = logits.norm(dim=1), logits.argmax(1), noisy != truth
    assert logged["clipped"] == pytest.approx((norms >= 3).float().mean().item())
    assert 0 < logged["clipped"] < 1
    for q in (0.05, 0.5, 0.95):
        assert logged[f"norm_{q}"] == pytest.approx(norms.quantile(q).item(), rel=0.003)
    assert logged["memorised"] == pytest.approx((predicted == noisy)[wrong].float().mean().item())
    assert logged["recovered"] == pytest.approx((predicted == truth)[wrong].float().mean().item())
    assert not model.criterion._forward_pre_hooks


def test_without_a_clip_or_true_labels_there_is_less_to_log(data):
    _, logged = fitted(lc.Loss("ce"), data)
    assert set(logged) == {f"norm_{q}" for q in (0.05, 0.25, 0.5, 0.75, 0.95)}


def test_masked_classes_do_not_count_in_the_norm(data):
    x, noisy, _ = data
    logits = torch.cat([x, torch.full((len(x), 1), -torch.inf)], 1)
    monitor, module = ClipMonitor(), nn.ModuleList([lc.LogitClip("ce", tau=3.0)])
    row = watch(monitor, module, data, lambda: module[0](logits, noisy.clamp(max=1)))
    assert row["logitclip/clipped"] == pytest.approx((x.norm(dim=1) >= 3).float().mean().item())
    assert row["logitclip/norm_0.5"] == pytest.approx(x.norm(dim=1).quantile(0.5).item(), rel=0.003)
    assert not module[0]._forward_pre_hooks


def watch(monitor, module, batch, call):
    """Run one epoch of a single call; return what is logged."""
    row: dict[str, float] = {}
    module.log_dict = lambda values, sync_dist: row.update(values)
    monitor.on_train_start(None, module)
    monitor.on_train_epoch_start(None, module)
    monitor.on_train_batch_start(None, module, batch, 0)
    call()
    monitor.on_train_epoch_end(None, module)
    monitor.teardown(None, module, "fit")
    return row


def test_quantiles_of_many_norms_in_little_memory():
    """Logits of 16 images: their norms take 17 MB a step, the monitor keeps less than 100 kB."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, 128, 128, generator=g) * torch.rand(4, 1, 128, 128, generator=g).mul(9).exp()
    target = torch.randint(3, (4, 128, 128), generator=g)
    monitor, module = ClipMonitor(), nn.ModuleList([lc.LogitClip("ce", tau=50.0)])
    row = watch(monitor, module, None, lambda: [module[0](logits, target) for _ in range(3)])
    norms = logits.norm(dim=1).flatten()
    for q in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert row[f"logitclip/norm_{q}"] == pytest.approx(norms.quantile(q).item(), rel=0.003)
    assert row["logitclip/clipped"] == pytest.approx((norms >= 50).float().mean().item())
    kept = [value for value in vars(monitor).values() if isinstance(value, torch.Tensor)]
    assert sum(value.numel() * value.element_size() for value in kept) < 100_000


@pytest.mark.parametrize("norms", [[0.0, 0.0], [1e-9, 1e30], [float("inf")], [float("nan"), 1.0]])
def test_extreme_norms_are_logged_at_the_ends(norms):
    logits = torch.tensor(norms)[:, None] * torch.tensor([[1.0, 0.0]])
    module = nn.ModuleList([lc.Loss("mae")])
    row = watch(ClipMonitor(), module, None, lambda: module[0](logits, torch.zeros(len(norms), dtype=torch.long)))
    assert all(0 <= value <= 2**16 for value in row.values())


@pytest.mark.parametrize("criterion", [lc.LogitClip(lc.Loss("ce", ignore_index=255), tau=3.0),
                                       lc.LogitClip(nn.CrossEntropyLoss(ignore_index=255), tau=3.0)])  # fmt: skip
def test_ignored_pixels_do_not_count(criterion):
    logits = torch.full((1, 2, 2, 2), 0.1)
    logits[..., 0] = 100.0  # large logits where nothing counts
    target = torch.tensor([[[255, 0], [255, 1]]])
    module = nn.ModuleList([criterion])
    row = watch(ClipMonitor(lambda batch: batch), module, torch.zeros_like(target), lambda: module[0](logits, target))
    assert row["logitclip/clipped"] == 0
    assert row["logitclip/norm_0.95"] < 1
    assert row["logitclip/memorised"] == 0


def test_several_criteria_are_told_apart(data):
    module = nn.ModuleDict({"main": lc.LogitClip("ce", tau=3.0), "extra": lc.Loss("ce")})
    with pytest.raises(ValueError, match=r"found several criteria, main and extra: name one, as in .*criterion='main'"):
        ClipMonitor().on_train_start(None, module)
    with pytest.raises(ValueError, match=r"found no criterion 'man'. Did you mean 'main'"):
        ClipMonitor(criterion="man").on_train_start(None, module)
    logits, noisy, _ = torch.cat([data[0], data[0][:, :1]], 1), *data[1:]
    row = watch(ClipMonitor(criterion="extra"), module, data, lambda: module["main"](100 * logits, noisy).backward)
    assert row == {}


def test_a_criterion_that_is_not_called_is_a_warning(data):
    monitor, module = ClipMonitor(), nn.ModuleList([lc.LinearLogitClip(2, 3, tau=3.0)])
    monitor.on_train_start(None, module)
    monitor.on_train_epoch_start(None, module)
    monitor.on_train_batch_start(None, module, data, 0)
    module[0](*data[:2])
    with pytest.warns(UserWarning, match="ClipMonitor has nothing to log"):
        monitor.on_train_epoch_end(None, module)


def test_a_module_without_a_criterion_is_refused(data):
    with pytest.raises(ValueError, match="found no criterion"):
        fitted(nn.CrossEntropyLoss(), data)

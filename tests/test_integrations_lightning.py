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
        assert logged[f"norm_{q}"] == pytest.approx(norms.quantile(q).item(), rel=1e-5)
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
    monitor.on_train_start(None, module)
    monitor.on_train_epoch_start(None, module)
    monitor.on_train_batch_start(None, module, data, 0)
    module[0](logits, noisy.clamp(max=1))
    monitor.teardown(None, module, "fit")
    torch.testing.assert_close(torch.cat(monitor._norms), x.norm(dim=1))


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

"""Losses beside their authors' own code: the largest differences of values and gradients.

    python benchmarks/authors_losses.py FOLDER

FOLDER has checkouts of Active-Negative-Loss, eps-softmax, joint-asymmetric-loss, OGC, GJS, ICML2023_LDR,
bi-tempered-loss, ELogitNormOOD and ELR, by these names; bi-tempered-loss needs jax. Logits are 64 rows of
7 classes in float64 with norms from 1 to 30, one row with p_y = e^-40. The result is results/losses_authors.csv, which
docs/losses.md shows.
"""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from logitclip import Loss, build_criterion
from logitclip.losses.memory import GradientMemory
from logitclip.methods.elr import elr_term, updated_targets
from logitclip.methods.gjs import gjs_loss

CLASSES = 7
RESULT = Path(__file__).parents[1] / "results" / "losses_authors.csv"
EXACT = "the same formula"


def module_of(folder: Path, file: str) -> Any:
    """Import a file of a checkout, as part of its package if it has one."""
    package = f"authors_{folder.name.replace('-', '_')}_{Path(file).parent.name or 'top'}"
    parent = types.ModuleType(package)
    parent.__path__ = [str((folder / file).parent)]
    sys.modules[package] = parent
    spec = importlib.util.spec_from_file_location(f"{package}.{Path(file).stem}", folder / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(64, CLASSES, generator=generator, dtype=torch.float64)
    z = z / z.norm(dim=1, keepdim=True) * torch.linspace(1, 30, 64, dtype=torch.float64)[:, None]
    y = torch.randint(CLASSES, (64,), generator=generator)
    z[0], z[0, 0], y[0] = 0, 40, 1
    return z, y


def gradient(criterion: Callable[..., Tensor], z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = z.clone().requires_grad_()
    value = criterion(z, y)
    (slope,) = torch.autograd.grad(value, z)
    return value.detach(), slope


def cases(folder: Path) -> list[tuple[str, str, Callable[..., Tensor], str]]:
    """Spec, repository, the authors' criterion, and why there is a difference."""
    anl = module_of(folder / "Active-Negative-Loss", "loss.py")
    eps = module_of(folder / "eps-softmax", "losses.py")
    jal = module_of(folder / "joint-asymmetric-loss", "losses.py")
    gjs = module_of(folder / "GJS", "losses.py")
    ldr = module_of(folder / "ICML2023_LDR", "loss.py")
    model = nn.Linear(1, 1)

    def with_model(criterion: Any) -> Callable[..., Tensor]:
        return lambda z, y: criterion(z, y, model)

    def one_hot(criterion: Any) -> Callable[..., Tensor]:
        return lambda z, y: criterion(z, nn.functional.one_hot(y, CLASSES).to(z.dtype))

    nfl = anl.NormalizedFocalLoss(gamma=0.5, num_classes=CLASSES)
    negative = anl.NormalizedNegativeFocalLoss(CLASSES, 0.5, 1e-7)
    negative_ce = anl.NormalizedNegativeCrossEntropy(CLASSES, 1e-7)
    active = anl.NormalizedCrossEntropy(CLASSES)
    join = anl.ActiveNegativeLoss  # without its L1 penalty, which is a penalty here
    return [
        ("nfl", "Active-Negative-Loss", nfl, EXACT),
        ("anl_ce", "Active-Negative-Loss", with_model(join(active, negative_ce, 5, 5)), "A = -log 1e-7 in float32"),
        ("anl_fl", "Active-Negative-Loss", with_model(join(nfl, negative, 5, 5)), "A = -log 1e-7 in float32"),
        ("eps_ce_mae", "eps-softmax", eps.ECEandMAE(m=1e5, alpha=0.01, beta=5), EXACT),
        ("eps_focal_mae", "eps-softmax", eps.EFLandMAE(m=1e5, alpha=0.01, beta=5), EXACT),
        ("ldr_kl:lam=1", "eps-softmax", eps.LDRLoss_V1(Lambda=1.0), "their margin is a float32 tensor"),
        ("amse", "joint-asymmetric-loss", jal.AMSELoss(a=30), EXACT),
        ("jal_ce", "joint-asymmetric-loss", jal.NCEandAMSE(1, 1, 30), EXACT),
        ("jal_fl", "joint-asymmetric-loss", jal.NFLandAMSE(1, 1, 30), EXACT),
        ("ldr_kl:lam=1,margin=2", "ICML2023_LDR", one_hot(ldr.LDRLoss_V1(threshold=2.0, Lambda=1.0)), EXACT),
        ("js", "GJS", gjs.JensenShannonDivergenceWeightedScaled(CLASSES, "0.7 0.3"), "their clamps of p at 1e-7"),
    ]


def ogc_rows(folder: Path) -> list[dict[str, Any]]:
    """OGC with the threshold of both at 0.2, and the threshold that both find from the same losses."""
    ogc = module_of(folder / "OGC", "methods/losses_ogc.py")
    common = {"epsilon": 20, "time_frame_s": 32, "queue_size_q": 4096, "binary_search_tol": 1e-7}
    common["binary_search_max_iter"] = 10
    rows = []
    z, y = batch()
    z = z[1:]  # p_y = e^-40 is below their clamp
    for spec, theirs in (
        ("ogc_ce", ogc.OGC_CE(**common)),
        ("ogc_focal", ogc.OGC_FL(**common, gamma=0.5)),
        ("ogc_gce", ogc.OGC_GCE(**common, q=0.7)),
    ):
        theirs.prob_thr_t = 0.2
        theirs.tau_t = theirs.mapping_p_to_grad(torch.tensor(0.2, dtype=torch.float64)).abs().item()
        ours = Loss(spec)
        assert isinstance(ours.memory, GradientMemory)
        ours.memory.threshold.data = torch.tensor(0.2, dtype=torch.float64)
        a, b = gradient(ours.eval(), z, y[1:]), gradient(lambda z, y, f=theirs: f(z, y, lr=0.1), z, y[1:])
        why = "their threshold is a float32 tensor"
        if spec != "ogc_ce":
            why += "; their value jumps at it, ours is continuous"
        rows.append(row(spec, "OGC", a, b, why, folder))
    return rows


def bi_tempered_row(folder: Path) -> dict[str, Any]:
    """The loss of google/bi-tempered-loss, in JAX, with its own gradient."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    theirs = module_of(folder / "bi-tempered-loss", "jax/loss.py")
    z, y = batch()
    labels = jnp.asarray(nn.functional.one_hot(y, CLASSES).double().numpy())

    def mean(activations: Any) -> Any:
        return theirs.bi_tempered_logistic_loss(activations, labels, 0.8, 1.2, 0.0, 50).mean()

    value, slope = jax.value_and_grad(mean)(jnp.asarray(z.numpy()))
    got = torch.tensor(float(value), dtype=torch.float64), torch.from_numpy(np.array(slope))
    why = "their fixed point after 50 steps"
    return row("bi_tempered", "bi-tempered-loss", gradient(Loss("bi_tempered"), z, y), got, why, folder)


def extended_logit_norm_row(folder: Path) -> dict[str, Any]:
    """Logits of a last layer, with gradients of its features and its weight."""
    theirs = module_of(folder / "ELogitNormOOD", "elogitnorm_loss.py")
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(5, CLASSES).double()
    head.weight.data = torch.randn(CLASSES, 5, generator=generator, dtype=torch.float64)
    h, y = torch.randn(64, 5, generator=generator, dtype=torch.float64).requires_grad_(), batch()[1]
    ours = build_criterion("ce", "extended_logit_norm", head=head)
    results = []
    for value in (ours(head(h), y), theirs.elogitnorm_loss(head(h), head.weight, y)):
        slopes = torch.autograd.grad(value, (h, head.weight))
        results.append((value.detach(), torch.cat([slope.flatten() for slope in slopes])))
    why = "1e-7 is added to the distance, so that equal logits give a number"
    return row("ce after extended_logit_norm", "ELogitNormOOD", results[0], results[1], why, folder)


def method_rows(folder: Path) -> list[dict[str, Any]]:
    """The objectives of ELR after three visits of each example, of Co-teaching and of GJS with two views."""
    (z, y), second = batch(), batch()[0].flip(0)
    parse_config = types.ModuleType("parse_config")  # of their repository; the loss reads only this value
    parse_config.ConfigParser = types.SimpleNamespace(get_instance=lambda: {"train_loss": {"args": {"lambda": 3.0}}})  # type: ignore[attr-defined]
    sys.modules["parse_config"] = parse_config
    elr = module_of(folder / "ELR", "ELR/model/loss.py").elr_loss(len(y), CLASSES, beta=0.7)
    elr.target, targets = elr.target.double(), torch.zeros(len(y), CLASSES, dtype=torch.float64)
    for visit in (z, second, z):
        theirs = gradient(lambda z, y: elr(torch.arange(len(y)), z, y), visit, y)
        targets = updated_targets(targets, visit, 0.7)

        def ours(z: Tensor, y: Tensor, targets: Tensor = targets) -> Tensor:
            return nn.functional.cross_entropy(z, y) + 3.0 * elr_term(z, targets)

    rows = [row("method elr", "ELR", gradient(ours, z, y), theirs, EXACT, folder)]

    gjs = module_of(folder / "GJS", "losses.py").JensenShannonDivergenceWeightedScaled(CLASSES, "0.5 0.25 0.25")
    target = nn.functional.one_hot(y, CLASSES).double()
    a = gradient(lambda z, y: gjs_loss([z, second], target, 0.5), z, y)
    rows.append(row("method gjs", "GJS", a, gradient(lambda z, y: gjs([z, second], y), z, y), EXACT, folder))
    return rows


def row(spec: str, name: str, ours: Any, theirs: Any, why: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], cwd=folder / name, capture_output=True, text=True)
    return {
        "loss": spec,
        "repository": name,
        "commit": COMMITS.get(name) or done.stdout.strip(),
        "value": f"{(ours[0] - theirs[0]).abs().item():.1e}",
        "gradient": f"{(ours[1] - theirs[1]).abs().max().item():.1e}",
        "why": why,
    }


COMMITS: dict[str, str] = dict(argument.split("=") for argument in sys.argv[2:])  # for folders without .git


def main() -> None:
    folder = Path(sys.argv[1])
    z, y = batch()
    rows = [
        row(spec, name, gradient(Loss(spec), z, y), gradient(theirs, z, y), why, folder)
        for spec, name, theirs, why in cases(folder)
    ]
    rows += [*ogc_rows(folder), bi_tempered_row(folder), extended_logit_norm_row(folder), *method_rows(folder)]
    with RESULT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for each in rows:
        print(*each.values(), sep="  ")


if __name__ == "__main__":
    main()

"""The networks: sizes against published figures, blocks against their formulas, and the contract of `build`."""

from __future__ import annotations

import inspect
import itertools
import math
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from logitclip import models
from logitclip.models import MODELS
from logitclip.models.blocks import ACTIVATIONS, PreActBlock, make_stem
from logitclip.models.densenet import DenseLayer
from logitclip.models.resnet import ResidualBlock
from logitclip.models.squeezenet import Fire

build: Callable[..., Any] = models.build  # the layers of a network have no static type

OWN = sorted(set(MODELS) - {"timm", "torchvision"})
OF_IMAGES = [name for name in OWN if "in_channels" in inspect.signature(MODELS[name]).parameters]
CIFAR = (3, 32, 32)
DIGIT = (1, 8, 8)

# (spec, classes, parameters). The 1000-class figures are torchvision's, the others follow from them (a stem of
# 3*64*9 instead of 3*64*49 weights, a head of K instead of 1000 rows) or are those commonly reported on CIFAR.
PARAMETERS = [
    ("resnet:depth=18,stem=imagenet", 1000, 11_689_512),
    ("resnet:depth=34,stem=imagenet", 1000, 21_797_672),
    ("resnet:depth=50,stem=imagenet", 1000, 25_557_032),
    ("resnet:depth=18,stem=imagenet", 10, 11_181_642),
    ("resnet:depth=34,stem=imagenet", 10, 21_289_802),
    ("resnet:depth=18,stem=imagenet", 50, 11_202_162),  # WebVision-mini
    ("resnet:depth=18,stem=cifar", 10, 11_173_962),
    ("resnet:depth=34,stem=cifar", 10, 21_282_122),
    ("resnet:depth=50,stem=cifar", 10, 23_520_842),
    ("resnet:depth=18,stem=cifar", 100, 11_220_132),
    ("preact_resnet:depth=18,final_norm=false", 10, 11_171_274),  # 128 of them in the norm of DivideMix's stem
    ("preact_resnet:depth=18,final_norm=true", 10, 11_172_298),  # + 2 * 512
    ("preact_resnet:depth=18,final_norm=false", 100, 11_217_444),
    ("preact_resnet:depth=34,final_norm=false", 10, 21_279_434),
    ("densenet:depth=121,stem=imagenet", 1000, 7_978_856),
    ("densenet:depth=169,stem=imagenet", 1000, 14_149_480),
    ("densenet:depth=201,stem=imagenet", 1000, 20_013_928),
    ("densenet:depth=121,stem=imagenet", 10, 6_964_106),
    ("densenet:depth=121,stem=cifar", 10, 6_956_426),
    ("squeezenet", 1000, 1_235_496),
    ("squeezenet", 10, 727_626),
    ("squeezenet:last_activation=false", 10, 727_626),
    ("wrn:depth=40,width=2", 10, 2_243_546),
    ("wrn:depth=40,width=2", 100, 2_255_156),
    ("wrn:depth=28,width=10", 10, 36_479_194),
    ("wrn:depth=16,width=4", 10, 2_748_890),
    ("cnn:width=32,norm=batch", 10, 288_746),
    ("cnn:width=32,norm=none", 10, 288_298),  # a bias instead of scale and shift for each of 448 channels
    # 27 * 32 + 288 * 64 + 576 * 128 and 224 biases; 2,049 * 256; 257 * 10
    ("strided_cnn:width=32,hidden=256,norm=none", 10, 620_362),
    ("strided_cnn:width=32,hidden=256,norm=batch", 10, 620_586),
    ("mlp:width=256,depth=3,norm=none", 10, 920_842),  # of 3 * 32 * 32 features
    ("mlp:width=256,depth=3,norm=batch", 10, 922_378),
    ("mlp:depth=0", 10, 30_730),
]

# (spec, classes, pixels, multiply-adds in units of 1e9): torchvision's tables and the usual CIFAR figures. A wrong
# stride changes these and not the number of parameters.
WORK = [
    ("resnet", 1000, 224, 1.814),
    ("resnet:depth=34", 1000, 224, 3.664),
    ("resnet:depth=50", 1000, 224, 4.089),
    ("densenet", 1000, 224, 2.834),
    ("densenet:depth=169", 1000, 224, 3.36),
    ("densenet:depth=201", 1000, 224, 4.291),
    ("squeezenet", 1000, 224, 0.349),
    ("wrn", 10, 32, 0.3276),
    ("strided_cnn", 10, 32, 0.000965),
    ("preact_resnet", 10, 32, 0.5554),
    ("resnet:stem=cifar", 10, 32, 0.5554),
    ("resnet:depth=34,stem=cifar", 10, 32, 1.159),
    ("densenet:stem=cifar", 10, 32, 0.888),
]

# How often each network applies its activation.
ACTIVATION_SITES = {
    "mlp": 3,
    "cnn": 6,
    "wrn": 37,  # two in each of 18 blocks, and the last
    "resnet": 17,
    "resnet:depth=50": 49,
    "preact_resnet": 17,
    "preact_resnet:final_norm=true": 18,
    "densenet": 121,  # stem, two in each of 58 layers, three transitions, the last
    "squeezenet": 18,
    "squeezenet:last_activation=false": 17,
    "strided_cnn": 4,
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def on_meta(spec: str, num_classes: int) -> nn.Module:
    """Build the network on the meta device, which is enough to count."""
    more = {"in_features": math.prod(CIFAR)} if spec.startswith("mlp") else {}
    with torch.device("meta"):
        return MODELS.build(spec)(num_classes, **more)


def images(n: int, shape=CIFAR, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# ---- size and work -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "num_classes", "parameters"), PARAMETERS)
def test_parameter_counts(spec, num_classes, parameters):
    assert count(on_meta(spec, num_classes)) == parameters


def test_the_papers_networks_have_their_published_size():
    """A network of the paper or of a method cannot go without a count; a new one needs none."""
    counted = {spec.partition(":")[0] for spec, *_ in PARAMETERS}
    assert counted >= {"wrn", "resnet", "preact_resnet", "densenet", "squeezenet", "cnn"}


@pytest.mark.parametrize(("depth", "width", "channels", "num_classes"), [(40, 2, 3, 10), (28, 10, 1, 7), (10, 1, 3, 2)])
def test_wrn_parameter_formula(depth, width, channels, num_classes):
    widths, total = [16, 16 * width, 32 * width, 64 * width], channels * 16 * 9
    for a, b in itertools.pairwise(widths):
        shortcut = a * b if a != b else 0
        first = 2 * a + 9 * a * b + 2 * b + 9 * b * b + shortcut
        total += first + ((depth - 4) // 6 - 1) * (4 * b + 18 * b * b)
    total += 2 * widths[-1] + widths[-1] * num_classes + num_classes
    with torch.device("meta"):
        model = MODELS.build(f"wrn:depth={depth},width={width}")(num_classes, in_channels=channels)
    assert count(model) == total


@pytest.mark.parametrize(("spec", "num_classes", "pixels", "work"), WORK)
def test_multiply_adds(spec, num_classes, pixels, work):
    with FlopCounterMode(display=False) as counter:
        on_meta(spec, num_classes).eval()(torch.zeros(1, 3, pixels, pixels, device="meta"))
    assert counter.get_total_flops() / 2e9 == pytest.approx(work, rel=5e-4)


# ---- the contract ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_contract(name):
    model = build(name, num_classes=7, input_shape=CIFAR)
    assert model.training
    assert all(p.device.type == "cpu" and p.requires_grad for p in model.parameters())
    x = images(8)
    logits = model(x)
    assert logits.shape == (8, 7)
    assert logits.dtype == torch.float32
    F.cross_entropy(logits, torch.arange(8) % 7).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), f"no gradient reaches {key}"
    model.eval()
    with torch.no_grad():
        once = model(x)
        assert torch.equal(once, model(x))  # no randomness left
        torch.testing.assert_close(model(x[2:3])[0], once[2], rtol=1e-4, atol=1e-5)  # rows are independent
    assert MODELS.describe(name)[1], "a model is listed with the first line of its docstring"


@pytest.mark.parametrize("spec", ["resnet", "resnet:depth=50", "densenet", "squeezenet"])
def test_imagenet_size(spec):
    assert build(spec, 50, (3, 224, 224))(images(2, (3, 224, 224))).shape == (2, 50)


@pytest.mark.parametrize("spec", ["mlp", "cnn", "wrn:depth=10", "resnet", "preact_resnet", "densenet:stem=cifar"])
@pytest.mark.parametrize("shape", [DIGIT, (1, 28, 28)])
def test_small_grey_images(spec, shape):
    assert build(spec, 10, shape)(images(3, shape)).shape == (3, 10)


def test_rebuild_takes_only_the_weights_of_its_network():
    trained = models.build("mlp:width=8", 3, (4,), seed=5)
    again = models.rebuild("mlp:width=8", 3, (4,), trained.state_dict())
    assert not again.training
    assert torch.equal(again(torch.ones(2, 4)), trained(torch.ones(2, 4)))
    with pytest.raises(ValueError, match=r"its weights are not those of the network mlp:width=16$"):
        models.rebuild("mlp:width=16", 3, (4,), trained.state_dict())


def test_mlp_takes_any_shape():
    for shape in [(20,), (2, 3), DIGIT, (1, 2, 3, 4)]:
        assert build("mlp:depth=1", 3, shape)(images(4, shape)).shape == (4, 3)
    features = images(4, (20,))
    linear = build("mlp:depth=0", 3, (20,))
    torch.testing.assert_close(linear(features), features @ linear.head.weight.T + linear.head.bias)


@pytest.mark.parametrize("name", OWN)
def test_channels_last_and_bfloat16(name):
    model, x = build(name, 10, CIFAR).eval(), images(4)
    with torch.no_grad():
        plain = model(x)
        last = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
        torch.testing.assert_close(last, plain, rtol=1e-3, atol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(x)
        low = model.to(torch.bfloat16)(x.to(torch.bfloat16))
    scale = plain.norm()
    for half in (mixed, low):
        assert half.dtype == torch.bfloat16
        assert (half.float() - plain).norm() < 0.1 * scale


@pytest.mark.parametrize("spec", ["mlp:norm=batch", "cnn:dropout=0.1", "wrn:depth=10", "squeezenet", "preact_resnet"])
def test_compiles_without_a_graph_break(spec):
    model, x = build(spec, 10, CIFAR).eval(), images(2)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


# ---- blocks against their formulas -------------------------------------------------------------------------------


def randomised(module: nn.Module) -> nn.Module:
    """Give norms statistics, scales and shifts other than 1 and 0, so that a missing norm is noticed."""
    generator = torch.Generator().manual_seed(1)
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            for tensor in (m.weight.data, m.bias.data, m.running_mean, m.running_var):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return module.eval()


def norm(m: nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, m.running_mean, m.running_var, m.weight, m.bias, eps=1e-5)


def layers(module: nn.Module, kind: type) -> list:
    return [m for m in module.modules() if isinstance(m, kind)]


@pytest.mark.parametrize(("outputs", "stride"), [(8, 1), (8, 2), (12, 1)])
@pytest.mark.parametrize("activated", [False, True])
def test_preactivation_block(outputs, stride, activated):
    block = randomised(PreActBlock(8, outputs, stride, activation="relu", activated_shortcut=activated))
    (n1, n2), (c1, c2, *c3) = layers(block, nn.BatchNorm2d), layers(block, nn.Conv2d)
    x = images(2, (8, 6, 6))
    y = F.relu(norm(n1, x))
    out = F.conv2d(F.relu(norm(n2, F.conv2d(y, c1.weight, stride=stride, padding=1))), c2.weight, padding=1)
    if (outputs, stride) == (8, 1):
        assert not c3
        shortcut = y if activated else x
    else:
        shortcut = F.conv2d(y, c3[0].weight, stride=stride)
    torch.testing.assert_close(block(x), out + shortcut)


@pytest.mark.parametrize(("spec", "activated"), [("", True), (":shortcut=raw", False)])
def test_preact_resnet_has_the_shortcut_of_dividemix_by_default(spec, activated):
    blocks = layers(on_meta("preact_resnet" + spec, 10), PreActBlock)
    assert [b.activated_shortcut for b in blocks if isinstance(b.shortcut, nn.Identity)] == [activated] * 5


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize(("outputs", "stride"), [(8, 1), (8, 2), (16, 1)])
def test_residual_block(bottleneck, outputs, stride):
    block = randomised(ResidualBlock(8, outputs, stride, activation="relu", bottleneck=bottleneck))
    norms, convs = layers(block, nn.BatchNorm2d), layers(block, nn.Conv2d)
    plan = [(0, 1), (1, stride), (0, 1)] if bottleneck else [(1, stride), (1, 1)]  # (padding, stride)
    x = out = images(2, (8, 6, 6))
    for i, (padding, step) in enumerate(plan):
        out = norm(norms[i], F.conv2d(out if i == 0 else F.relu(out), convs[i].weight, stride=step, padding=padding))
    same = (outputs, stride) == (8, 1)
    assert len(convs) == len(plan) + (not same)
    shortcut = x if same else norm(norms[-1], F.conv2d(x, convs[-1].weight, stride=stride))
    torch.testing.assert_close(block(x), F.relu(out + shortcut))


def test_dense_layer_and_fire():
    layer = randomised(DenseLayer(8, "relu"))
    (n1, n2), (c1, c2) = layers(layer, nn.BatchNorm2d), layers(layer, nn.Conv2d)
    x = images(2, (8, 6, 6))
    new = F.conv2d(F.relu(norm(n2, F.conv2d(F.relu(norm(n1, x)), c1.weight))), c2.weight, padding=1)
    torch.testing.assert_close(layer(x), torch.cat([x, new], 1))

    fire = Fire(8, 2, "relu")
    squeeze, one, three = layers(fire, nn.Conv2d)
    squeezed = F.relu(F.conv2d(x, squeeze.weight, squeeze.bias))
    ones, threes = F.conv2d(squeezed, one.weight, one.bias), F.conv2d(squeezed, three.weight, three.bias, padding=1)
    torch.testing.assert_close(fire(x), torch.cat([F.relu(ones), F.relu(threes)], 1))


def test_stems():
    x = images(2)
    for kind, stride, padding in (("imagenet", 2, 3), ("cifar", 1, 1)):
        stem = randomised(make_stem(kind, 3, 8, "relu"))
        (n,), (c,) = layers(stem, nn.BatchNorm2d), layers(stem, nn.Conv2d)
        out = F.relu(norm(n, F.conv2d(x, c.weight, stride=stride, padding=padding)))
        torch.testing.assert_close(stem(x), F.max_pool2d(out, 3, 2, 1) if kind == "imagenet" else out)


@pytest.mark.parametrize(
    ("spec", "activated"), [("wrn:depth=10", True), ("preact_resnet:final_norm=true", True), ("preact_resnet", False)]
)
def test_what_the_head_sees(spec, activated):
    """Features after a final norm and ReLU are not negative; DivideMix's network has neither."""
    model, seen = build(spec, 10, CIFAR), []
    model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(images(4))
    assert (seen[0].min() >= 0) == activated


# ---- knobs -------------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations(spec: str) -> Counter[str]:
    with Operations() as ops:
        on_meta(spec, 10).eval()(torch.zeros(1, *CIFAR, device="meta"))
    return ops.seen


def outputs_into(store: dict):
    return lambda module, args, out: store.update({module: out})


@pytest.mark.parametrize("spec", ACTIVATION_SITES)
def test_relu6_replaces_every_relu(spec):
    relu, relu6 = operations(spec), operations(spec + ("," if ":" in spec else ":") + "activation=relu6")
    assert (relu["relu"], relu["hardtanh"]) == (ACTIVATION_SITES[spec], 0)
    assert (relu6["relu"], relu6["hardtanh"]) == (0, ACTIVATION_SITES[spec])


def test_relu6_bounds_the_activations_of_every_family():
    families = [name for name in OWN if "activation" in MODELS.knobs(name)]
    assert len(families) > 5
    for name in families:
        model = build(f"{name}:activation=relu6", 10, CIFAR)
        sites = layers(model, nn.ReLU6)
        outputs = {}
        for m in sites:
            m.register_forward_hook(outputs_into(outputs))
        model(100 * images(4))
        assert 0 < len(sites) == len(outputs) == ACTIVATION_SITES.get(name, len(sites))
        assert not layers(model, nn.ReLU)
        assert all(0 <= out.min() <= out.max() <= 6 for out in outputs.values())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    reference = {"silu": F.silu, "gelu": F.gelu, "tanh": torch.tanh, "relu6": F.relu6, "relu": F.relu}
    reference["leaky_relu"] = F.leaky_relu
    model, x = build(f"mlp:depth=1,activation={activation}", 3, (5,)), images(4, (5,))
    hidden = F.linear(x, model.hidden[0].weight, model.hidden[0].bias)
    torch.testing.assert_close(model(x), model.head(reference[activation](hidden)))


@pytest.mark.parametrize("name", ["mlp", "cnn", "wrn", "squeezenet"])
def test_dropout(name):
    torch.manual_seed(0)
    x = images(4)
    wet, dry = build(f"{name}:dropout=0.3", 10, CIFAR), build(f"{name}:dropout=0", 10, CIFAR)
    assert not torch.equal(wet(x), wet(x))
    assert torch.equal(dry(x), dry(x))
    with torch.no_grad():
        fresh = build(f"{name}:dropout=0.3", 10, CIFAR).eval()
        assert torch.equal(fresh(x), build(f"{name}:dropout=0", 10, CIFAR).eval()(x))  # same weights, no dropout


def test_wrn_dropout_is_inside_the_residual_branch():
    block, x = PreActBlock(8, 8, 1, activation="relu", dropout=1.0), images(2, (8, 6, 6))
    assert torch.equal(block(x), x)


@pytest.mark.parametrize(("name", "kind"), [("mlp", nn.BatchNorm1d), ("cnn", nn.BatchNorm2d)])
def test_norm_knob(name, kind):
    sites = ACTIVATION_SITES[name]
    assert len(layers(on_meta(f"{name}:norm=batch", 10), kind)) == sites
    bare = on_meta(f"{name}:norm=none", 10)
    assert not layers(bare, kind)
    assert all(m.bias is not None for m in layers(bare, nn.Conv2d) + layers(bare, nn.Linear))


@pytest.mark.parametrize("spec", ["cnn:norm=none", "cnn", "mlp", "mlp:norm=batch"])
def test_small_models_learn(spec):
    """Ten smooth patterns under noise. `cnn:norm=none` fails this with torch's own initialisation."""
    y = torch.arange(128) % 10
    patterns = F.interpolate(images(10, (1, 2, 2)), size=8)
    x = patterns[y] + 0.5 * images(128, DIGIT, seed=1)
    model = build(spec, 10, DIGIT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(60):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model.eval()(x).argmax(1) == y).float().mean() > 0.9


def test_squeezenet_learns_without_its_last_activation():
    """With it all logits are 0 after some steps at this learning rate, for most draws of dropout."""
    x, y = images(64), torch.arange(64) % 10

    def spread(spec: str, seed: int) -> float:
        model = build(spec, 10, CIFAR, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for _ in range(25):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return model.eval()(x).std(0).max().item()

    assert all(spread("squeezenet:last_activation=false", seed) > 1e-3 for seed in range(3))
    assert any(spread("squeezenet", seed) == 0 for seed in range(3))


# ---- initialisation ----------------------------------------------------------------------------------------------


def test_initial_weights_have_the_published_spread():
    def spread(weight, fan):
        return (weight.std() * math.sqrt(fan)).item()

    for spec in ("wrn", "resnet"):
        for conv in layers(build(spec, 10, CIFAR), nn.Conv2d):
            if conv.weight.numel() > 10_000:
                fan_out = conv.out_channels * conv.kernel_size[0] ** 2
                assert spread(conv.weight, fan_out) == pytest.approx(math.sqrt(2), rel=0.05)
    for spec in ("densenet", "squeezenet", "cnn"):
        model = build(spec, 10, CIFAR)
        for conv in layers(model, nn.Conv2d):
            if conv.weight.numel() > 10_000:
                assert spread(conv.weight, conv.weight[0].numel()) == pytest.approx(math.sqrt(2), rel=0.05)
    assert layers(build("squeezenet", 100, CIFAR), nn.Conv2d)[-1].weight.std().item() == pytest.approx(0.01, rel=0.02)
    # torch's own, U(-1/sqrt(fan_in), 1/sqrt(fan_in)), where DivideMix's code sets nothing
    conv = layers(build("preact_resnet", 10, CIFAR), nn.Conv2d)[-2]
    assert spread(conv.weight, conv.weight[0].numel()) == pytest.approx(1 / math.sqrt(3), rel=0.05)

    # as in SOP's ResNet-34, whose code sets nothing
    for conv in layers(build("resnet:depth=34,stem=cifar,init=torch", 10, CIFAR), nn.Conv2d):
        if conv.weight.numel() > 10_000:
            assert spread(conv.weight, conv.weight[0].numel()) == pytest.approx(1 / math.sqrt(3), rel=0.05)

    for spec, zero in {"wrn": True, "densenet": True, "cnn": True, "resnet": False, "preact_resnet": False}.items():
        assert (build(spec, 10, CIFAR).head.linear.bias == 0).all() == zero
    assert not any(m.bias.any() for m in layers(build("squeezenet", 10, CIFAR), nn.Conv2d))


@pytest.mark.parametrize("name", OWN)
def test_weights_are_a_function_of_the_seed(name):
    def weights(seed):
        return list(build(name, 10, CIFAR, seed=seed).state_dict().values())

    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, other = weights(3), weights(4)
    assert torch.equal(torch.get_rng_state(), before), "the global random state moved"
    torch.manual_seed(456)
    assert all(torch.equal(a, b) for a, b in zip(first, weights(3), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_build_ignores_the_default_device_and_keeps_the_random_state_when_it_fails():
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = build("mlp", 3, (5,))
    assert torch.equal(model.head.weight, build("mlp", 3, (5,)).head.weight)
    with pytest.raises(ValueError):
        build("squeezenet", 3, DIGIT)
    assert torch.equal(torch.get_rng_state(), before)


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnett", "Unknown model 'resnett'. Did you mean 'resnet'?"),
        ("resnet:depth=19", "depth of a resnet must be one of 18, 34, 50; got 19."),
        ("preact_resnet:depth=50", "depth of a preact_resnet must be one of 18, 34; got 50."),
        ("densenet:depth=100", "depth of a densenet must be one of 121, 169, 201; got 100."),
        ("wrn:depth=41", "depth of a wrn must be 6 n + 4 (10, 16, 22, 28, 34, 40, ...), got 41."),
        ("wrn:depth=4", "depth of a wrn must be 6 n + 4"),
        ("wrn:width=0", "width must be at least 1, got 0."),
        ("mlp:depth=-1", "depth must be at least 0, got -1."),
        ("mlp:width=0", "width must be at least 1, got 0."),
        ("cnn:width=0", "width must be at least 1, got 0."),
        ("cnn:norm=layer", "norm of the model 'cnn' is one of none, batch; got 'layer'."),
        ("resnet:stem=mnist", "stem of the model 'resnet' is one of imagenet, cifar; got 'mnist'."),
        ("wrn:activation=relu7", "activation of the model 'wrn' is one of relu, relu6,"),
        ("wrn:dropout=2", "dropout probability has to be between 0 and 1"),
        ("wrn:in_channels=3", "The model 'wrn' has no knob 'in_channels'."),
        ("timm", "The model 'timm' needs 'name': write 'timm:name=...'."),
    ],
)
def test_bad_specs_are_refused(spec, message):
    with pytest.raises(ValueError) as error:
        build(spec, 10, CIFAR)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("function", "knobs", "message"),
    [
        (
            "wrn",
            {"activation": "relu7"},
            "activation must be one of relu, relu6, leaky_relu, gelu, silu, tanh; got 'relu7'",
        ),
        ("resnet", {"stem": "mnist"}, "stem must be one of imagenet, cifar; got 'mnist'"),
        ("cnn", {"norm": "layer"}, "norm must be one of none, batch; got 'layer'"),
        ("mlp", {"norm": "layer", "in_features": 3}, "norm must be one of none, batch; got 'layer'"),
        ("preact_resnet", {"shortcut": "no"}, "shortcut must be one of activated, raw; got 'no'"),
    ],
)
def test_knobs_are_checked_without_the_registry(function, knobs, message):
    with pytest.raises(ValueError, match=message):
        MODELS[function](10, **knobs)


@pytest.mark.parametrize("name", OF_IMAGES)
def test_image_models_refuse_features(name):
    with pytest.raises(ValueError, match=rf"'{name}' takes images \(C, H, W\), got inputs of shape \(20,\); 'mlp'"):
        build(name, 10, (20,))


@pytest.mark.parametrize(
    ("spec", "pixels"), [("squeezenet", 17), ("densenet", 29), ("densenet:stem=cifar", 8), ("cnn", 4)]
)
def test_images_too_small_are_refused_at_once(spec, pixels):
    build(spec, 10, (1, pixels, pixels))
    with pytest.raises(ValueError, match=f"The model '{spec.partition(':')[0]}' cannot take inputs of shape"):
        build(spec, 10, (1, pixels - 1, pixels - 1))


@pytest.mark.parametrize(("num_classes", "shape"), [(1, CIFAR), (0, CIFAR), (10, ()), (10, (3, 0, 32)), (10, (-1,))])
def test_bad_sizes_are_refused(num_classes, shape):
    with pytest.raises(ValueError, match=r"num_classes must be at least 2|input_shape must be"):
        build("mlp", num_classes, shape)


# ---- models of others --------------------------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch):
    """Register a function for the duration of a test."""
    entries = MODELS._entries

    def register(function):
        monkeypatch.setitem(entries, function.__name__, function)

    list(MODELS)  # load the families first
    return register


def test_a_plugin_may_ignore_its_input(registered):
    def lazy(num_classes: int, *, width: int = 4) -> nn.Module:
        """Infers its sizes from the first input."""
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(width), nn.Linear(width, num_classes))

    registered(lazy)
    model = build("lazy:width=6", 3, DIGIT, seed=1)
    assert model[1].weight.shape == (6, 64)
    assert torch.equal(model[1].weight, build("lazy:width=6", 3, DIGIT, seed=1)[1].weight)


def test_what_does_not_return_logits_is_refused(registered):
    def narrow(num_classes: int) -> nn.Module:
        return nn.Linear(5, 2)

    class Two(nn.Module):
        def forward(self, x):
            return x, x

    def pair(num_classes: int) -> nn.Module:
        return Two()

    registered(narrow)
    registered(pair)
    with pytest.raises(
        ValueError, match=r"'narrow' must return logits of shape \(N, 3\), got a tensor of shape \(1, 2\)"
    ):
        build("narrow", 3, (5,))
    with pytest.raises(ValueError, match=r"'pair' must return logits of shape \(N, 3\), got tuple"):
        build("pair", 3, (5,))


class Fake(nn.Module):
    """A stand-in for a network of another library; records its arguments."""

    def __init__(self, asked: dict) -> None:
        super().__init__()
        self.asked = asked
        self.linear = nn.Linear(asked.get("in_chans", 3), asked["num_classes"])

    def forward(self, x):
        return self.linear(x.mean((2, 3)))


def fake_create(name, **asked):
    if name not in ("net", "googlenet"):
        raise RuntimeError(f"Unknown model ({name})\nand more lines")
    return Fake({"name": name, **asked})


def test_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", types.SimpleNamespace(create_model=fake_create))
    model = build("timm:net,pretrained=true", 7, DIGIT)
    assert model.asked == {"name": "net", "pretrained": True, "num_classes": 7, "in_chans": 1}
    assert build("timm:net", 7, DIGIT).asked["pretrained"] is False
    with pytest.raises(ValueError) as error:
        build("timm:nett", 7, DIGIT)
    assert str(error.value) == "timm cannot make 'nett' (Unknown model (nett))."


def test_torchvision(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", types.SimpleNamespace(get_model=fake_create))
    assert build("torchvision:net", 7, CIFAR).asked == {"name": "net", "num_classes": 7}
    assert build("torchvision:googlenet", 7, CIFAR).asked["aux_logits"] is False
    with pytest.raises(ValueError, match="torchvision's models take 3 channels, got 1; 'timm:NAME' takes any number"):
        build("torchvision:net", 7, DIGIT)
    with pytest.raises(ValueError, match=r"torchvision cannot make 'nett' \(Unknown model \(nett\)\)"):
        build("torchvision:nett", 7, CIFAR)


@pytest.mark.parametrize("package", ["timm", "torchvision"])
@pytest.mark.parametrize(
    "body", ["raise RuntimeError('operator torchvision::nms does not exist\\nmore')", "import surely_not_installed"]
)
def test_a_library_that_does_not_load_is_one_sentence(package, body, monkeypatch, tmp_path):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(body, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError) as error:
        build(f"{package}:resnet18", 10, CIFAR)
    message = str(error.value)
    assert message.startswith(f"'{package}:NAME' needs {package}, which cannot be imported here (")
    assert message.endswith(f"pip install {package}")
    assert "\n" not in message


def test_importing_the_models_imports_neither_library():
    code = "import sys, logitclip.models as m; list(m.MODELS); print({'timm', 'torchvision'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"


@pytest.mark.parametrize("spec", ["mlp:depth=100000000", "wrn:depth=100000000"])
def test_a_network_of_millions_of_layers_is_soon_a_sentence(spec):
    with pytest.raises(ValueError, match="depth must be at most 1,000, got 100,000,000"):
        models.build(spec, 10, (3, 32, 32), seed=0)

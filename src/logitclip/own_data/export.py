"""A model as one ONNX file: preprocessing of numbers and categories, learners and calibration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from logitclip import files
from logitclip.data._preprocessing import LARGEST_NUMBER, Preprocessor
from logitclip.own_data.encoded import EncodedImages, EncodedTexts
from logitclip.own_data.learners import UNSEEN, Forest, Learner, Logistic
from logitclip.own_data.model import Model
from logitclip.own_data.network import Network
from logitclip.own_data.tables import Table
from logitclip.studies.drawing import check_suffix
from logitclip.text import explain_missing

if TYPE_CHECKING:
    import onnx
    from numpy.typing import ArrayLike
    from sklearn.preprocessing import OneHotEncoder

OPSET = {"": 17, "ai.onnx.ml": 3}
ONNX_ACTIVATIONS = {nn.ReLU: "Relu", nn.Tanh: "Tanh"}


def export(model: Model, path: str | Path) -> None:
    """Write a model as an ONNX file.

    Its inputs are the columns by name, [N, 1]: float64 for numbers (NaN is missing) and text for categories (empty is
    missing). For a model on an encoder they are one input, `features`, float32 [N, D]. Its outputs are `probabilities`,
    float32 [N, K], and `class`, [N], with the type of the labels.

    Args:
        model: The model.
        path: The file to write; its name ends in .onnx.

    Raises:
        ValueError: If the name has another ending, or a part of the model has no counterpart in ONNX.
        ImportError: If onnx is not installed.
    """
    check_suffix(Path(path), (".onnx",), "model")
    with explain_missing("Exporting needs onnx", "onnx"):
        import onnx
    graph = _Graph()
    features = _add_inputs(graph, model)
    mixed = [graph.add("Mul", _add_learner(graph, one, features), graph.constant([w])) for one, w in model.learners]
    total = mixed[0] if len(mixed) == 1 else graph.add("Sum", *mixed)
    log_p = graph.add("Log", graph.add("Max", total, graph.constant([1e-12])))
    prior = np.array(model.facts["log_prior"], np.float32)
    tempered = graph.add("Div", log_p, graph.constant([model.facts["temperature"]]))
    graph.add("Softmax", graph.add("Add", tempered, graph.constant(prior)), axis=1, out="probabilities")
    classes = model.classes_
    label_type = (
        onnx.TensorProto.STRING if classes.dtype == object else onnx.helper.np_dtype_to_tensor_dtype(classes.dtype)
    )
    best = graph.add("ArgMax", "probabilities", axis=1, keepdims=0)
    graph.add("Gather", graph.constant(classes, keep_type=True), best, axis=0, out="class")
    outputs = [
        onnx.helper.make_tensor_value_info("probabilities", onnx.TensorProto.FLOAT, ["N", len(classes)]),
        onnx.helper.make_tensor_value_info("class", label_type, ["N"]),
    ]
    made = onnx.helper.make_graph(graph.nodes, "logitclip", graph.inputs, outputs, graph.constants)
    versions = [onnx.helper.make_opsetid(domain, version) for domain, version in OPSET.items()]
    whole = onnx.helper.make_model(made, opset_imports=versions, ir_version=8, producer_name="logitclip")
    onnx.checker.check_model(whole)
    files.write(Path(path), whole.SerializeToString())


class _Graph:
    """The nodes of a graph so far; values are known by their names."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []

    def add(self, operator: str, *inputs: str, out: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Add an operator and return the name of its result."""
        import onnx

        out = out or f"{operator} {len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(operator, list(inputs), [out], domain=domain, **attributes))
        return out

    def constant(self, values: ArrayLike, *, keep_type: bool = False) -> str:
        """Add a constant, float32 unless its type is to be kept, and return its name."""
        import onnx

        name, array = f"constant {len(self.constants)}", np.asarray(values)
        array = array if keep_type else array.astype(np.float32)
        self.constants.append(onnx.numpy_helper.from_array(array, name))
        return name

    def input(self, name: str, kind: str, shape: list[int | str]) -> str:
        """Add an input and return its name."""
        import onnx

        self.inputs.append(onnx.helper.make_tensor_value_info(name, getattr(onnx.TensorProto, kind), shape))
        return name


# -- inputs ------------------------------------------------------------------------------------------------------------


def _add_inputs(graph: _Graph, model: Model) -> str:
    """Return the features, float32 [N, D]."""
    kind = model.kind
    if isinstance(kind, EncodedImages | EncodedTexts):
        if isinstance(kind, EncodedTexts) and kind.preprocessor.kinds:
            raise ValueError("A model of texts with columns beside them cannot be exported: fit it only on the texts.")
        taken = graph.input("features", "FLOAT", ["N", len(kind.mean)])
        centred = graph.add("Sub", taken, graph.constant(kind.mean))
        return graph.add("Div", centred, graph.constant(kind.std))
    if type(kind) is not Table:
        raise ValueError(f"A model of {kind.name}s cannot be exported unless an encoder makes their features.")
    preprocessor = kind.preprocessor
    dates = [name for name, what in preprocessor.kinds.items() if what == "date"]
    if dates:
        raise ValueError(f"The column {dates[0]!r} holds dates, which cannot be exported: fit without it.")
    parts = [*_add_numbers(graph, preprocessor), *_add_categories(graph, preprocessor)]
    return parts[0] if len(parts) == 1 else graph.add("Concat", *parts, axis=1)


def _add_numbers(graph: _Graph, preprocessor: Preprocessor) -> list[str]:
    names = [name for name, what in preprocessor.kinds.items() if what == "number"]
    if not names:
        return []
    imputer, scaler = (step for _, step in preprocessor.transformer.named_transformers_["numbers"].steps)
    taken = [graph.input(name, "DOUBLE", ["N", 1]) for name in names]
    x = taken[0] if len(taken) == 1 else graph.add("Concat", *taken, axis=1)
    unknown = graph.add("Or", graph.add("IsNaN", x), graph.add("IsInf", graph.add("Cast", x, to=1)))
    filled = graph.add("Where", unknown, graph.constant(imputer.statistics_, keep_type=True), x)
    limits = (graph.constant(np.float64(sign * LARGEST_NUMBER), keep_type=True) for sign in (-1, 1))
    centred = graph.add("Sub", graph.add("Clip", filled, *limits), graph.constant(scaler.mean_, keep_type=True))
    scaled = graph.add("Div", centred, graph.constant(scaler.scale_, keep_type=True))
    most = float(np.finfo(np.float32).max)
    ends = (graph.constant(np.float64(sign * most), keep_type=True) for sign in (-1, 1))
    return [graph.add("Cast", graph.add("Clip", scaled, *ends), to=1)]


def _add_categories(graph: _Graph, preprocessor: Preprocessor) -> list[str]:
    """Look each value up among the categories, and its row up in a table of their codes."""
    import pandas as pd

    names = [name for name, what in preprocessor.kinds.items() if what == "category"]
    if not names:
        return []
    encoder = preprocessor.transformer.named_transformers_["categories"]
    parts = []
    for j, (name, known) in enumerate(zip(names, encoder.categories_, strict=True)):
        rows = np.array([[other[0] for other in encoder.categories_]] * (len(known) + 2), dtype=object)
        unseen = "".join(map(str, known)) + "?"  # longer than any value, so none of them
        rows[:, j] = [*known, "<missing>", unseen]
        start = sum(_columns(encoder, k) for k in range(j))
        named = pd.DataFrame(rows, columns=encoder.feature_names_in_)
        codes = encoder.transform(named)[:, start : start + _columns(encoder, j)]
        keys = [*map(str, known), *([] if "<missing>" in known else ["<missing>"]), ""]
        missing = list(known).index("<missing>") if "<missing>" in known else len(known)
        values = [*range(len(known)), *([] if "<missing>" in known else [len(known)]), missing]
        place = graph.add(
            "LabelEncoder",
            graph.input(name, "STRING", ["N", 1]),
            domain="ai.onnx.ml",
            keys_strings=keys,
            values_int64s=values,
            default_int64=len(known) + 1,
        )
        flat = graph.add("Reshape", place, graph.constant(np.array([-1], np.int64), keep_type=True))
        parts.append(graph.add("Gather", graph.constant(codes), flat, axis=0))
    return parts


def _columns(encoder: OneHotEncoder, j: int) -> int:
    """Return how many features a category has: its rare values share one."""
    rare = encoder.infrequent_categories_[j]
    return len(encoder.categories_[j]) - (0 if rare is None else len(rare) - 1)


# -- learners ----------------------------------------------------------------------------------------------------------


def _add_learner(graph: _Graph, learner: Learner, features: str) -> str:
    """Return the probabilities of a learner, float32 [N, K]."""
    if isinstance(learner, Logistic):
        weights = (learner.weights * learner.scale).astype(np.float64)
        bias = learner.bias - weights @ learner.centre
        scores = graph.add("Gemm", features, graph.constant(weights.T), graph.constant(bias))
        return _every_class(graph, graph.add("Softmax", scores, axis=1), learner, learner.seen)
    if isinstance(learner, Forest):
        return _every_class(graph, _add_forest(graph, learner, features), learner, np.arange(learner.classes))
    if isinstance(learner, Network):
        return graph.add("Softmax", _add_network(graph, learner, features), axis=1)
    raise ValueError(f"The learner {learner.name} cannot be exported: fit with --learner network,forest,logistic.")


def _every_class(graph: _Graph, found: str, learner: Learner, seen: np.ndarray) -> str:
    """Spread the classes that a learner has seen over all K, as `Learner` does."""
    spread = np.eye(learner.classes)[seen]
    least = graph.add("Max", graph.add("MatMul", found, graph.constant(spread)), graph.constant([UNSEEN]))
    total = graph.add("ReduceSum", least, graph.constant(np.array([1], np.int64), keep_type=True), keepdims=1)
    return graph.add("Div", least, total)


def _add_forest(graph: _Graph, forest: Forest, features: str) -> str:
    inner, trees = forest.feature >= 0, len(forest.roots)
    tree = np.searchsorted(forest.roots, np.arange(len(forest.feature)), side="right") - 1
    node = np.arange(len(forest.feature)) - forest.roots[tree]
    # Features are float32: x <= t holds exactly if x <= the next float32 below t.
    limit = forest.threshold.astype(np.float32)
    limit = np.where(limit > forest.threshold, np.nextafter(limit, np.float32(-np.inf)), limit)
    leaves = np.flatnonzero(~inner)
    target, leaf = np.tile(np.arange(forest.classes), len(leaves)), np.repeat(leaves, forest.classes)
    children = {
        side: np.where(inner, getattr(forest, side) - forest.roots[tree], 0).tolist() for side in ("left", "right")
    }
    return graph.add(
        "TreeEnsembleRegressor",
        features,
        domain="ai.onnx.ml",
        n_targets=forest.classes,
        aggregate_function="SUM",
        nodes_treeids=tree.tolist(),
        nodes_nodeids=node.tolist(),
        nodes_featureids=np.where(inner, forest.feature, 0).tolist(),
        nodes_modes=np.where(inner, "BRANCH_LEQ", "LEAF").tolist(),
        nodes_values=np.where(inner, limit, 0.0).tolist(),
        nodes_truenodeids=children["left"],
        nodes_falsenodeids=children["right"],
        target_treeids=tree[leaf].tolist(),
        target_nodeids=node[leaf].tolist(),
        target_ids=target.tolist(),
        target_weights=(forest.value[leaf, target] / trees).tolist(),
    )


def _add_network(graph: _Graph, learner: Network, features: str) -> str:
    assert learner.network is not None
    x = features
    for layer in learner.network.modules():
        if isinstance(layer, nn.Linear):
            bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias
            x = graph.add("Gemm", x, graph.constant(layer.weight.detach().T), graph.constant(bias.detach()))
        elif type(layer) in ONNX_ACTIVATIONS:
            x = graph.add(ONNX_ACTIVATIONS[type(layer)], x)
        elif not isinstance(layer, nn.Sequential | nn.Dropout | nn.Flatten | nn.Identity):
            raise ValueError(
                f"A {type(layer).__name__} in the network {learner.options.model} cannot be exported: use an mlp."
            )
    return x

"""`loss_func` in the real Trainer and SFTTrainer, on tiny randomly initialised models."""

import pytest
import torch
from memory import Memory
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

from logitclip import LogitClip, Loss
from logitclip.integrations.huggingface import WeightColumn, loss_func

transformers = pytest.importorskip("transformers")
TASKS = ("sequence", "token", "causal")


def model_for(task):
    torch.manual_seed(0)
    small = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"intermediate_size": 16, "max_position_embeddings": 16}
    if task == "causal":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, pad_token_id=0))
    config = transformers.BertConfig(**small, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    kind = "Sequence" if task == "sequence" else "Token"
    return getattr(transformers, f"BertFor{kind}Classification")(config)


def examples(task, n=8, length=6):
    """Make batches with different numbers of counted labels, for which a mean of means would be wrong."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(20, (n, length), generator=g)
    if task == "sequence":
        return [{"input_ids": x, "labels": y} for x, y in zip(ids, torch.randint(4, (n,), generator=g), strict=True)]
    labels = ids.clone() if task == "causal" else torch.randint(4, (n, length), generator=g)
    for row, counted in enumerate((6, 1, 2, 6, 3, 1, 5, 2)):
        labels[row, counted:] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


def trained(task, folder, batch_size, compute_loss_func, **more):
    """Take one SGD step on eight examples; return the weights and the logged loss."""
    accumulated = 8 // batch_size
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulated,
        max_steps=1,
        learning_rate=1.0,
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        lr_scheduler_type="constant",
        **more,
    )
    trainer = transformers.Trainer(
        model_for(task), arguments, train_dataset=examples(task), compute_loss_func=compute_loss_func
    )
    trainer.train()
    weights = nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    return weights, trainer.state.log_history[0]["loss"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_accumulated_batch_equals_the_whole_one(task, smoothing, tmp_path):
    compute = loss_func("gce:q=0.5", "norm:tau=0.2", label_smoothing=smoothing)
    whole, whole_loss = trained(task, tmp_path, 8, compute)
    accumulated, accumulated_loss = trained(task, tmp_path, 2, compute)
    assert not torch.allclose(whole, nn.utils.parameters_to_vector(model_for(task).parameters()), atol=1e-3)
    torch.testing.assert_close(accumulated, whole, atol=1e-5, rtol=1e-4)
    assert accumulated_loss == pytest.approx(whole_loss, rel=1e-3)


@pytest.mark.parametrize("task", TASKS)
def test_without_a_clip_ce_trains_as_the_model_itself_does(task, tmp_path):
    own, own_loss = trained(task, tmp_path, 8, None)
    ours, our_loss = trained(task, tmp_path, 8, loss_func("ce", "none"))
    torch.testing.assert_close(ours, own, atol=1e-5, rtol=1e-4)
    assert our_loss == pytest.approx(own_loss, rel=1e-3)


@pytest.mark.parametrize("task", TASKS)
def test_label_smoothing_is_that_of_trainer(task, tmp_path):
    own, _ = trained(task, tmp_path, 8, None, label_smoothing_factor=0.2)
    ours, _ = trained(task, tmp_path, 8, loss_func("ce", "none", label_smoothing=0.2))
    torch.testing.assert_close(ours, own, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("task", TASKS)
def test_the_loss_is_the_criterion_on_labels_that_count(task):
    batch = examples(task)
    ids, labels = (torch.stack([example[key] for example in batch]) for key in ("input_ids", "labels"))
    outputs = model_for(task)(input_ids=ids)
    logits = outputs.logits
    if task == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    expected = LogitClip("ce", temp=1.5)(*flat)
    given = torch.stack([example["labels"] for example in batch])
    torch.testing.assert_close(loss_func("ce", "norm:temp=1.5")(outputs, given), expected)
    total = LogitClip(Loss("ce", reduction="sum"), temp=1.5)(*flat)
    torch.testing.assert_close(loss_func("ce", "norm:temp=1.5")(outputs, given, num_items_in_batch=50), total / 50)


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_data_parallel_gives_the_loss_of_the_whole_batch(task, averaged, tmp_path):
    """Trainer sees two GPUs; the model returns the logits of the whole batch, as DataParallel does."""
    more = {"average_tokens_across_devices": averaged, "use_cpu": True, "report_to": []}
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **more)
    trainer = transformers.Trainer(model_for(task), arguments, compute_loss_func=loss_func("ce", "norm:temp=1.5"))
    batch = {key: torch.stack([example[key] for example in examples(task)]) for key in ("input_ids", "labels")}

    def loss(devices):
        arguments._n_gpu = devices
        items = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
        return trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=items).mean()

    torch.testing.assert_close(loss(2), loss(1))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("loss", ["ce", "gce:q=0.5"])
def test_label_smoothing_needs_no_more_memory_than_that_of_torch(loss):
    logits, labels = numbers(512, 8000).requires_grad_(), torch.arange(512)
    labels[::5] = -100

    def peak(compute):
        with Memory(logits, labels) as memory:
            compute().backward()
        return memory.peak

    torchs = peak(lambda: cross_entropy(logits, labels, label_smoothing=0.1))
    assert peak(lambda: loss_func(loss, label_smoothing=0.1)({"logits": logits}, labels)) < torchs


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_labels(smoothing):
    logits, soft = numbers(6, 5), numbers(6, 5).softmax(1)
    compute = loss_func("ce", "none", label_smoothing=smoothing)
    expected = cross_entropy(logits, soft, label_smoothing=smoothing)
    torch.testing.assert_close(compute({"logits": logits}, soft), expected)
    tokens = {"logits": logits.view(2, 3, 5)}
    compute = loss_func("ce", "none", label_smoothing=smoothing, shift=False)
    torch.testing.assert_close(compute(tokens, soft.view(2, 3, 5)), expected)


@pytest.mark.parametrize("size", [(8, 8), (4, 4)])
def test_dense_outputs_are_resized_to_their_labels(size):
    logits, labels = numbers(2, 5, *size), torch.randint(5, (2, 8, 8), generator=torch.Generator().manual_seed(1))
    labels[0, :4] = 255
    compute = loss_func("ce", "none", ignore_index=255)
    whole = interpolate(logits, size=(8, 8), mode="bilinear", align_corners=False)
    torch.testing.assert_close(compute({"logits": logits}, labels), cross_entropy(whole, labels, ignore_index=255))
    soft = whole.softmax(1)
    torch.testing.assert_close(loss_func("ce", "none")({"logits": logits}, soft), cross_entropy(whole, soft))


def test_a_model_of_pixels_trains_as_its_own_loss_does():
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        num_labels=3, hidden_sizes=[8, 8, 8, 8], depths=[1] * 4, num_attention_heads=[1] * 4, decoder_hidden_size=8
    )
    model = transformers.SegformerForSemanticSegmentation(config).eval()
    labels = torch.randint(3, (1, 32, 32))
    labels[0, :9] = 255
    outputs = model(pixel_values=numbers(1, 3, 32, 32), labels=labels)
    torch.testing.assert_close(loss_func("ce", "none", ignore_index=255)(outputs, labels), outputs.loss)


def test_class_weights():
    logits, labels, weight = numbers(6, 3), torch.tensor([0, 1, 2, 2, -100, 1]), torch.tensor([0.5, 1.0, 2.0])
    compute = loss_func("ce", "none", class_weight=weight)
    total = cross_entropy(logits, labels, weight=weight, reduction="sum")
    torch.testing.assert_close(compute({"logits": logits}, labels), total / 5)
    torch.testing.assert_close(compute({"logits": logits}, labels, num_items_in_batch=7), total / 7)


def test_a_criterion_of_your_own():
    logits, labels = numbers(6, 3), torch.tensor([0, 1, 2, 2, -100, 1])
    compute = loss_func(nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum"), "norm:tau=1")
    expected = LogitClip(nn.CrossEntropyLoss(label_smoothing=0.1), tau=1.0)(logits, labels)
    torch.testing.assert_close(compute({"logits": logits}, labels), expected)
    with pytest.raises(ValueError, match="needs reduction='sum', got 'mean'"):
        loss_func(nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="extended_logit_norm needs the last layer of the model"):
        loss_func("ce", "extended_logit_norm")
    with pytest.raises(ValueError, match="has its clip already"):
        loss_func(LogitClip("ce", temp=1.5))
    with pytest.raises(ValueError, match="need a loss by name"):
        loss_func(nn.CrossEntropyLoss(reduction="sum"), label_smoothing=0.1)
    with pytest.raises(ValueError, match="column 'weight' needs a loss by name"):
        compute({"logits": logits}, labels, weight=torch.ones(6))


class WeightedTrainer(WeightColumn, transformers.Trainer):
    pass


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("batch_size", [8, 2])
def test_a_weight_of_2_is_an_example_twice(task, batch_size, tmp_path):
    """A step with weights equals a step on the gradient of the weighted sum, over the number of labels."""
    weights = torch.tensor([2.0, 0.0, 1.0, 0.5, 1.0, 3.0, 0.0, 0.5])
    rows = [{**row, "weight": w} for row, w in zip(examples(task), weights, strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=batch_size, gradient_accumulation_steps=8 // batch_size,
        max_steps=1, learning_rate=1.0, optim="sgd", max_grad_norm=0.0, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=True, lr_scheduler_type="constant",
    )  # fmt: skip
    compute = loss_func("ce", "norm:tau=0.2")
    trainer = WeightedTrainer(
        model_for(task),  # type: ignore[call-arg]  # the type of Trainer is unknown here
        arguments,
        train_dataset=rows,
        eval_dataset=examples(task),
        compute_loss_func=compute,
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0  # without weights
    model = model_for(task)
    ids, labels = (torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels"))
    outputs = model(input_ids=ids)
    of_each = pairs(task, outputs.logits, labels)
    each = [LogitClip(Loss("ce", reduction="sum"), tau=0.2)(*pair) for pair in of_each]
    count = sum(int((y != -100).sum()) for _, y in of_each)
    (weights @ torch.stack(each) / count).backward()
    for by_hand, parameter in zip(model.parameters(), trainer.model.parameters(), strict=True):
        step = 0 if by_hand.grad is None else by_hand.grad
        torch.testing.assert_close(parameter, by_hand - step, atol=1e-5, rtol=1e-4)


def pairs(task, logits, labels):
    """Return the logits and labels of each example."""
    if task == "sequence":
        return list(zip(logits[:, None], labels[:, None], strict=True))
    if task == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return list(zip(logits, labels, strict=True))


def test_a_missing_column_of_weights_is_refused(tmp_path):
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    trainer = WeightedTrainer(
        model_for("sequence"),  # type: ignore[call-arg]
        arguments,
        train_dataset=examples("sequence"),
        compute_loss_func=loss_func(),
    )
    with pytest.raises(ValueError, match="found no column 'weight'"):
        trainer.train()


def test_a_batch_without_labels_that_count_is_zero():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    for smoothing in (0.0, 0.1):
        loss = loss_func(shift=False, label_smoothing=smoothing)({"logits": logits}, torch.full((2, 3), -100))
        loss.backward()
        assert loss == 0
        assert not logits.grad.any()


def test_mistakes_are_one_sentence():
    with pytest.raises(ValueError, match=r"label_smoothing must be at least 0 and below 1, got 1\.5"):
        loss_func(label_smoothing=1.5)
    with pytest.raises(ValueError, match="Did you mean 'norm'"):
        loss_func("ce", "nrm:tau=1")
    with pytest.raises(ValueError, match=r"shift=True"):
        loss_func()({"logits": torch.zeros(2, 3, 4)}, torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="no 'labels'"):
        loss_func()({"logits": torch.zeros(2, 4)}, None)
    with pytest.raises(ValueError, match=r"Labels for logits .* must have the shape \(2,\), got \(2, 3\)"):
        loss_func()({"logits": torch.zeros(2, 4)}, torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"Probabilities .* must have the shape \(2, 4\), got \(2,\)"):
        loss_func()({"logits": torch.zeros(2, 4)}, torch.zeros(2))


TEXTS = ["a b c", "c d", "e f a b d", "b"]


def words():
    """Make a tokenizer of eight words."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[EOS]", "a", "b", "c", "d", "e", "f"])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[PAD]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", eos_token="[EOS]")


def supervised(folder, compute_loss_func=None, batch_size=4, **more):
    """Take one SGD step of SFTTrainer on four texts; return the model."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    arguments = trl.SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=4 // batch_size,
        max_steps=1,
        learning_rate=1.0,
        optim="sgd",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **more,
    )
    trainer = trl.SFTTrainer(
        model_for("causal"),
        arguments,
        train_dataset=datasets.Dataset.from_dict({"text": TEXTS}),
        processing_class=words(),
        compute_loss_func=compute_loss_func,
    )
    trainer.train()
    return trainer.model


@pytest.mark.parametrize("batch_size", [4, 1])
def test_sft_trainer(tmp_path, batch_size):
    trained = supervised(tmp_path, loss_func("ce", "norm:tau=1"), batch_size)
    # The same step by hand, on all four texts at once.
    tokenizer = words()
    ids = [tokenizer(text)["input_ids"] + [1] for text in TEXTS]
    longest = max(map(len, ids))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in ids])
    model = model_for("causal")
    loss = loss_func("ce", "norm:tau=1")(model(input_ids=padded, attention_mask=(labels >= 0).long()), labels)
    loss.backward()
    for by_hand, parameter in zip(model.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(parameter, by_hand - by_hand.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("loss_type", "loss"), [("dft", "mae:scale=1"), ("dft", "gce:q=1"), ("nll", "ce"), ("nll", "gce:q=0.0001")]
)
def test_gce_runs_from_supervised_to_dynamic_fine_tuning(tmp_path, loss_type, loss):
    """TRL's own step equals ours: DFT is mae:scale=1 and gce:q=1, SFT is ce and gce with q near 0."""
    theirs = nn.utils.parameters_to_vector(supervised(tmp_path, loss_type=loss_type).parameters())
    ours = nn.utils.parameters_to_vector(supervised(tmp_path, loss_func(loss, "none")).parameters())
    start = nn.utils.parameters_to_vector(model_for("causal").parameters())
    assert (ours - theirs).norm() <= 1e-3 * (theirs - start).norm()

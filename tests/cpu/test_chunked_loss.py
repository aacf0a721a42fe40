"""LifecycleChunkedLoss without FSDP, on one process: against torchtitan's wrapper and full logits.

Several ranks are in tests/cpu/test_chunked_loss_parallel.py, FSDP in tests/partial_backwards.py.
"""

import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torchtitan.components.loss import (
    IGNORE_INDEX,
    BaseLoss,
    ChunkedLossWrapper,
    CrossEntropyLoss,
    MSELoss,
)
from torchtitan.config import CompileConfig
from torchtitan.experiments.graph_trainer.ep_chunk_pass import mark_chunk_dynamic_dims
from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced

from tests import scenarios as s
from titan_lifecycle import LifecycleChunkedLoss
from titan_lifecycle.losses.from_weight import HeadWeightLoss, LinearCrossEntropyLoss

BATCH, DIM, VOCAB = 2, 8, 32


def make_loss(head=None, *, loss_fn=None, **config):
    loss = LifecycleChunkedLoss.Config(**config).build()
    if head is not None:
        loss.set_lm_head(head)
    if loss_fn is not None:
        loss.loss_fn = loss_fn
    return loss


def make_stock_loss(head, *, num_chunks, loss_fn=None):
    loss = ChunkedLossWrapper.Config(num_chunks=num_chunks).build()
    loss.set_lm_head(head)
    if loss_fn is not None:
        loss.loss_fn = loss_fn
    return loss


def make_head(*, bias=False, dtype=torch.float32, requires_grad=True):
    torch.manual_seed(0)
    return nn.Linear(DIM, VOCAB, bias=bias, dtype=dtype).requires_grad_(requires_grad)


def make_inputs(length, *, dtype=torch.float32, requires_grad=True, seed=1):
    """Hidden states, labels of which some are ignored, and the number of the others."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BATCH, length, DIM, generator=generator).to(dtype)
    labels = torch.randint(VOCAB, (BATCH, length), generator=generator)
    labels[0, 0] = labels[1, length // 2] = IGNORE_INDEX
    return hidden.requires_grad_(requires_grad), labels, (labels != IGNORE_INDEX).sum()


def full_logits(head, hidden, labels, tokens=None):
    loss = F.cross_entropy(head(hidden).flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return loss if tokens is None else loss / tokens


def gradients(hidden, head):
    """All gradients, ``None`` where there is none, which are then cleared."""
    tensors = {"hidden": hidden, **dict(head.named_parameters())}
    found = {name: tensor.grad for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.grad = None
    return found


def assert_same(actual, expected, *, exact=False):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None, name
            continue
        tolerance = {"rtol": 0, "atol": 0} if exact else {}
        torch.testing.assert_close(
            actual[name], value, **tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def cross_entropy(logits, labels, tokens):
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return (loss if tokens is None else loss / tokens), {}


class Recorder:
    """An inner loss that keeps what it was called with."""

    def __init__(self, inner=cross_entropy):
        self.inner = inner
        self.calls = []

    def __call__(self, logits, labels, tokens, **loss_inputs):
        self.calls.append((logits, labels, tokens, loss_inputs))
        return self.inner(logits, labels, tokens)


# A drop-in for torchtitan's wrapper


def test_is_one_of_torchtitans_losses():
    config = LifecycleChunkedLoss.Config()
    loss = config.build()
    for cls in (ChunkedLossWrapper, BaseLoss):
        assert isinstance(loss, cls)
        assert isinstance(config, cls.Config)
    assert isinstance(loss.loss_fn, CrossEntropyLoss)


@pytest.mark.parametrize("length, num_chunks", [(8, 1), (8, 4), (8, 8), (12, 3)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["compatible", "coalesced"])
def test_bits_of_the_stock_wrapper(length, num_chunks, bias, dtype, reduction):
    head = make_head(bias=bias, dtype=dtype)
    results = []
    for loss_fn in (
        make_loss(head, num_chunks=num_chunks, head_reduction=reduction),
        make_stock_loss(head, num_chunks=num_chunks),
    ):
        hidden, labels, tokens = make_inputs(length, dtype=dtype)
        loss, metrics = loss_fn(hidden, labels, tokens)
        assert metrics == {}
        loss.backward()
        assert hidden.grad.dtype == dtype
        results.append({"loss": loss.detach(), **gradients(hidden, head)})
    assert_same(*results, exact=True)


def test_bits_of_the_stock_wrapper_for_hidden_states_that_are_not_contiguous():
    head = make_head()
    results = []
    for loss_fn in (make_loss(head, num_chunks=4), make_stock_loss(head, num_chunks=4)):
        hidden, labels, _ = make_inputs(8)
        transposed = hidden.detach().transpose(1, 2).contiguous().requires_grad_()
        loss, _ = loss_fn(transposed.transpose(1, 2), labels)
        loss.backward()
        results.append({"loss": loss.detach(), **gradients(transposed, head)})
    assert_same(*results, exact=True)


@pytest.mark.parametrize(
    "length, config",
    [
        (10, {"num_chunks": 4}),
        (9, {"num_chunks": 2}),
        (7, {"num_chunks": 7}),
        (10, {"chunk_tokens": 4}),
        (8, {"chunk_tokens": 3}),
        (8, {"chunk_tokens": 4}),
        (3, {"chunk_tokens": 100}),
        (11, {}),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_parity_with_full_logits(length, config, bias):
    head = make_head(bias=bias)
    hidden, labels, tokens = make_inputs(length)
    expected_loss = full_logits(head, hidden, labels, tokens)
    expected_loss.backward()
    expected = {"loss": expected_loss.detach(), **gradients(hidden, head)}
    loss, _ = make_loss(head, **config)(hidden, labels, tokens)
    loss.backward()
    assert_same({"loss": loss.detach(), **gradients(hidden, head)}, expected)


def test_a_decoder_is_trained_through_the_loss():
    """Several microbatches accumulate, and the gradient reaches the embedding."""
    case = s.Case(bias=True)
    batches = s.make_batches(3, 1, length=10)
    expected_loss, expected = s.reference_step(s.make_model(case), batches)
    model = s.make_model(case)
    loss_fn = s.make_loss(case)
    loss_fn.set_lm_head(model.lm_head)
    total, tokens = torch.zeros(()), s.num_valid(batches)
    for ((inputs, labels),) in batches:
        loss, _ = loss_fn(model(inputs), labels, tokens)
        loss.backward()
        total = total + loss.detach()
    torch.testing.assert_close(total, expected_loss)
    assert "tok_embeddings.weight" in expected
    assert_same(s.gradients(model), expected)


def test_autograd_grad_of_the_hidden_states():
    head = make_head()
    hidden, labels, _ = make_inputs(8)
    (expected,) = torch.autograd.grad(full_logits(head, hidden, labels), hidden)
    (actual,) = torch.autograd.grad(make_loss(head, num_chunks=4)(hidden, labels)[0], hidden)
    torch.testing.assert_close(actual, expected)


def test_another_inner_loss():
    """Its labels need not be token ids: MSE has one target per logit."""
    head = make_head()
    hidden, _, _ = make_inputs(9)
    target = torch.ones(BATCH, 9, VOCAB)
    expected = F.mse_loss(head(hidden), target, reduction="sum")
    loss, _ = make_loss(head, num_chunks=2, loss_fn=MSELoss.Config().build())(hidden, target)
    torch.testing.assert_close(loss.detach(), expected.detach())


def test_the_inner_loss_may_be_replaced_on_the_instance():
    head = make_head()
    hidden, labels, tokens = make_inputs(8)
    loss_fn = make_loss(head, num_chunks=4)
    loss, _ = loss_fn(hidden, labels, tokens)
    inner = loss_fn.loss_fn
    loss_fn.loss_fn = lambda *args: (2 * inner(*args)[0], {"ours/mean": torch.tensor(1.0)})
    twice, metrics = loss_fn(hidden, labels, tokens)
    torch.testing.assert_close(twice, 2 * loss)
    assert metrics.keys() == {"ours/mean"}


def test_one_chunk_of_logits_is_alive_at_a_time():
    """Nor is the last one alive while the head computes the next."""
    seen = []

    def assert_none_alive(*_):
        assert [logits for logits in seen if logits() is not None] == []

    def inner(logits, labels, tokens):
        seen.append(weakref.ref(logits))
        return cross_entropy(logits, labels, tokens)

    head = make_head()
    head.register_forward_pre_hook(assert_none_alive)
    hidden, labels, _ = make_inputs(8)
    loss_fn = make_loss(head, num_chunks=4, loss_fn=inner)
    loss_fn(hidden, labels)
    with torch.no_grad():
        loss_fn(hidden, labels)
    assert len(seen) == 8


# Metrics


class Metrics:
    """An inner loss with one metric of each kind, from one value per chunk."""

    def __init__(self, names):
        self.names = names
        self.values = iter([3.0, 1.0, 4.0, 2.0])

    def __call__(self, logits, labels, tokens):
        value = torch.tensor(next(self.values))
        return cross_entropy(logits, labels, tokens)[0], dict.fromkeys(self.names, value)


KINDS = {"a/mean": 10, "a/frac": 10, "a_mean": 10, "a_frac": 10, "a/max": 4, "a/min": 1}


@pytest.mark.parametrize("grad", [True, False])
def test_metrics_are_combined_as_the_stock_wrapper_does(grad):
    head = make_head()
    hidden, labels, tokens = make_inputs(8, requires_grad=grad)
    results = [
        make(head, num_chunks=4, loss_fn=Metrics(KINDS))(hidden, labels, tokens)
        for make in (make_loss, make_stock_loss)
    ]
    for loss, metrics in results:
        assert {key: value.item() for key, value in metrics.items()} == KINDS
        torch.testing.assert_close(loss, results[0][0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["entropy", "a/sum", "a_max"])
def test_a_metric_of_unknown_kind_is_an_error(name):
    hidden, labels, _ = make_inputs(8)
    loss_fn = make_loss(make_head(), num_chunks=4, loss_fn=Metrics([name]))
    with pytest.raises(ValueError, match=f"how to reduce metric '{name}'.*_frac, /max, or /min"):
        loss_fn(hidden, labels)


# Inputs


def test_loss_inputs():
    """Tensors are split along the sequence, anything else is passed as it is."""
    hidden, labels, tokens = make_inputs(7)
    positions = torch.arange(7).expand(BATCH, 7)
    weights = torch.rand(BATCH, 7, 3, 2)
    broadcast = torch.rand(1, 7)
    others = {"name": "x", "scale": 0.5, "nothing": None, "pair": (1, 2), "map": {"a": 1}}
    recorder = Recorder()
    make_loss(make_head(), num_chunks=3, loss_fn=recorder)(
        hidden, labels, tokens, positions=positions, weights=weights, broadcast=broadcast, **others
    )
    start = 0
    for logits, chunk_labels, chunk_tokens, given in recorder.calls:
        end = start + logits.shape[1]
        torch.testing.assert_close(chunk_labels, labels[:, start:end])
        assert chunk_tokens is tokens
        tensors = {"positions": positions, "weights": weights, "broadcast": broadcast}
        for key, value in tensors.items():
            torch.testing.assert_close(given.pop(key), value[:, start:end])
        for key, value in others.items():
            assert given.pop(key) is value
        assert not given
        start = end
    assert start == 7


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 31])
def test_chunk_lengths(length):
    hidden, labels, _ = make_inputs(length)
    for n in range(1, length + 1):
        recorder = Recorder()
        make_loss(make_head(), num_chunks=n, loss_fn=recorder)(hidden, labels)
        lengths = [logits.shape[1] for logits, *_ in recorder.calls]
        assert len(lengths) == n
        assert sum(lengths) == length
        assert max(lengths) - min(lengths) <= 1
        recorder = Recorder()
        make_loss(make_head(), chunk_tokens=n, loss_fn=recorder)(hidden, labels)
        *first, last = (logits.shape[1] for logits, *_ in recorder.calls)
        assert first == [n] * len(first)
        assert 0 < last <= n
        assert sum(first) + last == length


def test_eight_chunks_by_default():
    recorder = Recorder()
    hidden, labels, _ = make_inputs(16)
    make_loss(make_head(), loss_fn=recorder)(hidden, labels)
    assert len(recorder.calls) == ChunkedLossWrapper.Config().num_chunks == 8


def test_chunks_are_contiguous():
    recorder = Recorder()
    shapes = []
    head = make_head()
    head.register_forward_pre_hook(lambda _, args: shapes.append(args[0].is_contiguous()))
    hidden, labels, _ = make_inputs(9)
    make_loss(head, num_chunks=2, loss_fn=recorder)(hidden, labels)
    assert shapes == [True, True]
    assert all(chunk.is_contiguous() for _, chunk, *_ in recorder.calls)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"num_chunks": 0}, "loss.num_chunks must be at least 1, got 0"),
        ({"num_chunks": -2}, "loss.num_chunks must be at least 1, got -2"),
        ({"chunk_tokens": 0}, "loss.chunk_tokens must be at least 1, got 0"),
        (
            {"num_chunks": 4, "chunk_tokens": 16},
            r"loss.num_chunks \(4\) and loss.chunk_tokens \(16\) exclude each other",
        ),
    ],
)
def test_config_is_validated(config, message):
    with pytest.raises(ValueError, match=message):
        LifecycleChunkedLoss.Config(**config)
    with pytest.raises(ValueError, match=message):
        replace(LifecycleChunkedLoss.Config(), **config)


def test_a_forgotten_head():
    hidden, labels, _ = make_inputs(8)
    with pytest.raises(RuntimeError, match=r"call set_lm_head\(model\.lm_head\).*_skip_lm_head"):
        make_loss()(hidden, labels)


def test_more_chunks_than_tokens():
    hidden, labels, _ = make_inputs(3)
    with pytest.raises(ValueError, match=r"num_chunks \(4\) .* 3 tokens .*at most 3.*chunk_tokens"):
        make_loss(make_head(), num_chunks=4)(hidden, labels)


HIDDEN, LABELS = torch.zeros(BATCH, 8, DIM), torch.zeros(BATCH, 8, dtype=torch.long)


@pytest.mark.parametrize(
    "pred, labels, message",
    [
        (HIDDEN, LABELS[:, :4], r"shape \(2, 8, 8\) and its labels \(2, 4\); .*\[B, L, D\]"),
        (HIDDEN, LABELS[:1], r"labels \(1, 8\)"),
        (HIDDEN, LABELS.flatten(), r"labels \(16,\)"),
        (HIDDEN.flatten(0, 1), LABELS.flatten(), r"shape \(16, 8\)"),
        ((HIDDEN, HIDDEN), (LABELS,), "got 2 predictions and 1 labels"),
        ((HIDDEN, HIDDEN), LABELS, "got 2 predictions and 1 labels"),
        (HIDDEN, (LABELS, LABELS), "got 1 predictions and 2 labels"),
        ((), (), "got 0 predictions and 0 labels"),
        ((HIDDEN, HIDDEN[:, :4]), (LABELS, LABELS), r"prediction 1 has shape \(2, 4, 8\)"),
        (
            (HIDDEN, HIDDEN[:, :4]),
            (LABELS, LABELS[:, :4]),
            r"prediction 1 has shape \(2, 4, 8\) and prediction 0 has \(2, 8, 8\)",
        ),
    ],
)
def test_wrong_shapes(pred, labels, message):
    with pytest.raises(ValueError, match=message):
        make_loss(make_head(), num_chunks=2)(pred, labels)


@pytest.mark.parametrize("value", [torch.tensor(1.0), torch.zeros(8), torch.zeros(BATCH, 4)])
def test_wrong_shape_of_a_loss_input(value):
    loss_fn = make_loss(make_head(), num_chunks=2, loss_fn=Recorder())
    with pytest.raises(ValueError, match=r"loss input 'weights' has shape .* \[B, L, \.\.\.\]"):
        loss_fn(HIDDEN, LABELS, weights=value)


def test_predictions_that_require_grad_beside_others_that_do_not():
    head = make_head()
    loss_fn = make_loss(head, num_chunks=2, loss_fn=sum_of_losses)
    pred = (HIDDEN.clone().requires_grad_(), HIDDEN)
    message = "prediction 1 has requires_grad=False and prediction 0 has requires_grad=True"
    with pytest.raises(ValueError, match=message):
        loss_fn(pred, (LABELS, LABELS))
    with pytest.raises(ValueError, match=r"requires_grad=True and prediction 0 has .*=False"):
        loss_fn(pred[::-1], (LABELS, LABELS))
    assert_same(gradients(pred[0], head), {"hidden": None, "weight": None})
    with torch.no_grad():
        loss_fn(pred, (LABELS, LABELS))


# Train or evaluate


@pytest.mark.parametrize("hidden_grad", [True, False])
@pytest.mark.parametrize("head_grad", [True, False])
def test_what_needs_a_gradient_gets_one(hidden_grad, head_grad):
    head = make_head(requires_grad=head_grad, bias=True)
    hidden, labels, tokens = make_inputs(9, requires_grad=hidden_grad)
    expected_loss = full_logits(head, hidden, labels, tokens)
    if hidden_grad or head_grad:
        expected_loss.backward()
    expected = gradients(hidden, head)
    assert [g is not None for g in expected.values()] == [hidden_grad, head_grad, head_grad]

    loss, _ = make_loss(head, num_chunks=4)(hidden, labels, tokens)
    torch.testing.assert_close(loss.detach(), expected_loss.detach())
    assert loss.requires_grad == (hidden_grad or head_grad)
    if hidden_grad or head_grad:
        loss.backward()  # as a trainer and a pipeline stage do, whatever is frozen
    assert_same(gradients(hidden, head), expected)


def test_a_frozen_decoder_trains_the_head_before_backward_is_called():
    """And backward() on the returned loss adds nothing to it."""
    head = make_head()
    hidden, labels, _ = make_inputs(8, requires_grad=False)
    loss, _ = make_loss(head, num_chunks=4)(hidden, labels)
    before = head.weight.grad.clone()
    assert before.abs().sum() > 0
    loss.backward()
    torch.testing.assert_close(head.weight.grad, before, rtol=0, atol=0)


def test_an_adapter_in_a_frozen_head_is_trained():
    head = nn.Sequential(make_head(requires_grad=False), nn.Linear(VOCAB, VOCAB, bias=False))
    hidden, labels, _ = make_inputs(8, requires_grad=False)
    full_logits(head, hidden, labels).backward()
    expected = gradients(hidden, head)
    make_loss(head, num_chunks=4)(hidden, labels)
    assert expected["1.weight"] is not None
    assert_same(gradients(hidden, head), expected)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_gradients_disabled(guard):
    head = make_head()
    hidden, labels, tokens = make_inputs(9)
    recorder = Recorder()
    with guard():
        loss, _ = make_loss(head, num_chunks=4, loss_fn=recorder)(hidden, labels, tokens)
    assert not loss.requires_grad
    assert not any(logits.requires_grad for logits, *_ in recorder.calls)
    torch.testing.assert_close(loss, full_logits(head, hidden, labels, tokens).detach())
    assert_same(gradients(hidden, head), {"hidden": None, "weight": None})


# Ignored labels


def constant_if_ignored(logits, labels, tokens):
    """A constant where nothing is to be learned, as losses with a mask often give."""
    if isinstance(logits, tuple):
        losses = [
            constant_if_ignored(*both, tokens)[0] for both in zip(logits, labels, strict=True)
        ]
        return losses[0] + losses[1], {}
    if (labels == IGNORE_INDEX).all():
        return torch.zeros(()), {}
    return cross_entropy(logits, labels, tokens)


class ConstantIfIgnored(LinearCrossEntropyLoss):
    def __call__(self, pred, labels, global_valid_tokens=None, **kwargs):
        if (labels == IGNORE_INDEX).all():
            return torch.zeros(()), {}
        return super().__call__(pred, labels, global_valid_tokens, **kwargs)


INNER_LOSSES = {
    "cross_entropy": CrossEntropyLoss.Config().build,
    "constant": lambda: constant_if_ignored,
    "linear_cross_entropy": LinearCrossEntropyLoss.Config().build,
    "constant_from_weight": lambda: ConstantIfIgnored(LinearCrossEntropyLoss.Config()),
}


@pytest.mark.parametrize("inner", INNER_LOSSES)
@pytest.mark.parametrize("hidden_grad", [True, False])
@pytest.mark.parametrize("ignored", [slice(0, 3), slice(3, 6), slice(6, 8), slice(0, 8)])
def test_ignored_chunks_give_a_finite_connected_zero(inner, hidden_grad, ignored):
    """Chunks of 3, 3 and 2 tokens, of which one, or all, have nothing to learn."""
    head = make_head(bias=True)
    hidden, labels, tokens = make_inputs(8, requires_grad=hidden_grad)
    labels[:, ignored] = IGNORE_INDEX
    expected_loss = full_logits(head, hidden, labels, tokens)
    expected_loss.backward()
    expected = gradients(hidden, head)
    loss_fn = make_loss(head, num_chunks=3, loss_fn=INNER_LOSSES[inner]())
    loss, _ = loss_fn(hidden, labels, tokens)
    assert loss.requires_grad
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss.detach())
    if ignored == slice(0, 8):
        assert loss.item() == 0
        # Not None: with FSDP, this rank reduces its zeros with the others' gradients.
        for name, gradient in gradients(hidden, head).items():
            if name != "hidden" or hidden_grad:
                assert gradient.count_nonzero() == 0, name
    else:
        assert_same(gradients(hidden, head), expected)


def test_an_ignored_chunk_of_one_prediction_among_several():
    head = make_head()
    (hidden, labels, _), (hidden2, labels2, _) = make_inputs(8), make_inputs(8, seed=2)
    labels2[:, :4] = IGNORE_INDEX
    (full_logits(head, hidden, labels) + full_logits(head, hidden2, labels2)).backward()
    expected = [hidden2.grad, gradients(hidden, head)]
    hidden2.grad = None
    loss_fn = make_loss(head, num_chunks=2, loss_fn=constant_if_ignored)
    loss_fn((hidden, hidden2), (labels, labels2))[0].backward()
    torch.testing.assert_close(hidden2.grad, expected[0])
    assert_same(gradients(hidden, head), expected[1])


# Several predictions


def sum_of_losses(logits, labels, tokens, **loss_inputs):
    assert isinstance(logits, tuple) and isinstance(labels, tuple)
    losses = [cross_entropy(*both, tokens)[0] for both in zip(logits, labels, strict=True)]
    return sum((1 + i) * loss for i, loss in enumerate(losses)), {}


@pytest.mark.parametrize("num_predictions", [1, 2, 3])
@pytest.mark.parametrize("config", [{"num_chunks": 4}, {"num_chunks": 3}, {"chunk_tokens": 3}])
@pytest.mark.parametrize("hidden_grad", [True, False])
def test_several_predictions_are_as_separate_losses(num_predictions, config, hidden_grad):
    head = make_head(bias=True)
    inputs = [make_inputs(8, seed=i, requires_grad=hidden_grad) for i in range(num_predictions)]
    hiddens, labels = tuple(h for h, *_ in inputs), tuple(t for _, t, _ in inputs)
    tokens = inputs[0][2]

    expected_loss = torch.zeros(())
    for i in range(num_predictions):
        loss_fn = make_loss(head, loss_fn=lambda *a, i=i: ((1 + i) * cross_entropy(*a)[0], {}))
        loss_fn.num_chunks = 4
        loss, _ = loss_fn(hiddens[i], labels[i], tokens)
        loss.backward()
        expected_loss = expected_loss + loss.detach()
    expected = [h.grad for h in hiddens], gradients(hiddens[0], head)
    for h in hiddens:
        h.grad = None

    recorder = Recorder(sum_of_losses)
    loss, _ = make_loss(head, loss_fn=recorder, **config)(hiddens, labels, tokens)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss)
    for hidden, gradient in zip(hiddens, expected[0], strict=True):
        torch.testing.assert_close(hidden.grad, gradient)
    assert_same(gradients(hiddens[0], head), expected[1])
    # Aligned: each prediction with the same tokens as its labels.
    for logits, chunk_labels, *_ in recorder.calls:
        assert len(logits) == len(chunk_labels) == num_predictions
        assert {x.shape[:2] for x in logits} == {y.shape for y in chunk_labels}


def test_a_list_of_predictions():
    hidden, labels, _ = make_inputs(8)
    loss_fn = make_loss(make_head(), num_chunks=2, loss_fn=sum_of_losses)
    as_list, _ = loss_fn([hidden, hidden], [labels, labels])
    as_tuple, _ = loss_fn((hidden, hidden), (labels, labels))
    torch.testing.assert_close(as_list, as_tuple)


# An inner loss from the head's weight


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("config", [{"num_chunks": 4}, {"num_chunks": 3}, {"chunk_tokens": 5}])
@pytest.mark.parametrize("hidden_grad, head_grad", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("normalize", [True, False])
def test_linear_cross_entropy(bias, config, hidden_grad, head_grad, normalize):
    head = make_head(bias=bias, requires_grad=head_grad)
    hidden, labels, tokens = make_inputs(8, requires_grad=hidden_grad)
    tokens = tokens if normalize else None
    expected_loss = full_logits(head, hidden, labels, tokens)
    expected_loss.backward()
    expected = gradients(hidden, head)
    loss_fn = make_loss(head, **config, loss_fn=LinearCrossEntropyLoss.Config().build())
    loss, metrics = loss_fn(hidden, labels, tokens)
    assert metrics == {}
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss.detach())
    assert_same(gradients(hidden, head), expected)
    with torch.no_grad():
        evaluated, _ = loss_fn(hidden, labels, tokens)
    torch.testing.assert_close(evaluated, loss.detach())


class FromWeight(HeadWeightLoss):
    """What a fused kernel computes, by hand; takes several predictions and other inputs."""

    def __init__(self, *, fails=False):
        self.fails = fails
        self.seen = []

    def __call__(self, pred, labels, global_valid_tokens=None, *, weight, bias, **loss_inputs):
        self.seen.append((global_valid_tokens, loss_inputs))
        if self.fails:
            raise s.ChunkFailure("in the loss")
        loss = torch.zeros(())
        for hidden, target in zip(pred, labels, strict=True):
            loss = loss + cross_entropy(F.linear(hidden, weight, bias), target, None)[0]
        return loss, {"hidden/mean": torch.ones(())}


def test_several_predictions_from_the_weight():
    head = make_head(bias=True)
    (hidden, labels, tokens), (hidden2, labels2, _) = make_inputs(7), make_inputs(7, seed=2)
    (full_logits(head, hidden, labels) + full_logits(head, hidden2, labels2)).backward()
    expected = [hidden2.grad, gradients(hidden, head)]
    hidden2.grad = None
    inner = FromWeight()
    weights = torch.rand(BATCH, 7)
    loss, metrics = make_loss(head, num_chunks=3, loss_fn=inner)(
        (hidden, hidden2), (labels, labels2), tokens, weights=weights, name="x"
    )
    loss.backward()
    assert metrics["hidden/mean"].item() == 3
    torch.testing.assert_close(hidden2.grad, expected[0])
    assert_same(gradients(hidden, head), expected[1])
    assert all(given is tokens for given, _ in inner.seen)
    assert all(inputs["name"] == "x" for _, inputs in inner.seen)
    torch.testing.assert_close(torch.cat([i["weights"] for _, i in inner.seen], dim=1), weights)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("own_forward", [False, True])
def test_the_heads_forward_is_restored(fails, own_forward):
    head = make_head()
    if own_forward:
        # As torchtitan's Module.parallelize does, on the instance.
        head.forward = lambda x: 2 * F.linear(x, head.weight)
    before = dict(vars(head))
    hidden, labels, _ = make_inputs(8)
    x = hidden.detach()
    expected = head(x)
    loss_fn = make_loss(head, num_chunks=2, loss_fn=FromWeight(fails=fails))
    if fails:
        with pytest.raises(s.ChunkFailure, match="in the loss"):
            loss_fn((hidden,), (labels,))
    else:
        loss_fn((hidden,), (labels,))
    assert vars(head).keys() == before.keys()
    assert vars(head).get("forward") is before.get("forward")
    torch.testing.assert_close(head(x), expected, rtol=0, atol=0)


# Compile


@pytest.mark.parametrize("inner", [CrossEntropyLoss, LinearCrossEntropyLoss])
@pytest.mark.parametrize("length, num_compilations", [(8, 1), (10, 2)])
def test_a_compiled_inner_loss(inner, length, num_compilations):
    """Uneven chunks included: two lengths, two compilations, and no more on the next call."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    head = make_head(bias=True)
    config = LifecycleChunkedLoss.Config(num_chunks=4, loss_fn=inner.Config())
    compiled = config.build(
        compile_config=CompileConfig(enable=True, components=["loss"], backend=counter)
    )
    compiled.set_lm_head(head)
    results = []
    for loss_fn in (
        compiled,
        compiled,
        make_loss(head, num_chunks=4, loss_fn=config.loss_fn.build()),
    ):
        hidden, labels, tokens = make_inputs(length)
        loss, _ = loss_fn(hidden, labels, tokens)
        loss.backward()
        results.append({"loss": loss.detach(), **gradients(hidden, head)})
    assert_same(results[0], results[2])
    assert_same(results[1], results[2])
    assert counter.frame_count == num_compilations


@pytest.mark.parametrize("config", [None, CompileConfig(enable=True, components=["model"])])
def test_the_inner_loss_is_compiled_only_if_the_loss_is_named(config):
    loss_fn = LifecycleChunkedLoss.Config().build(compile_config=config)
    assert not hasattr(loss_fn.loss_fn.fn, "_torchdynamo_orig_callable")


# Tracing


def train_step(loss_fn):
    def step(hidden, labels, weights):
        loss, metrics = loss_fn(hidden, labels, weights=weights)
        return loss, metrics, torch.autograd.grad(loss, hidden)

    return step


def make_traced_inputs(length, **kwargs):
    hidden, labels, _ = make_inputs(length, **kwargs)
    return hidden, labels, torch.rand(BATCH, length)


def assert_traced_is_right(traced, head, length):
    hidden, *others = make_traced_inputs(length, seed=length)
    loss, metrics, gradient = traced(hidden, *others)
    expected = full_logits(head, hidden, others[0])
    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, hidden))
    assert metrics == {}


@pytest.mark.parametrize("num_chunks, lengths", [(4, [16, 8, 4]), (3, [16]), (1, [16, 3])])
def test_a_symbolic_length(num_chunks, lengths):
    """Traced once for every multiple of the number of chunks, or else for this length."""
    head = make_head(requires_grad=False)
    step = train_step(make_loss(head, num_chunks=num_chunks))
    traced = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(
        *make_traced_inputs(16)
    )
    splits = [n for n in traced.graph.nodes if n.target is torch.ops.aten.split_with_sizes.default]
    assert len(splits) == 3  # hidden states, labels, weights
    for length in lengths:
        assert_traced_is_right(traced, head, length)


def test_a_symbolic_length_with_chunk_tokens():
    head = make_head(requires_grad=False)
    traced = make_fx(
        train_step(make_loss(head, chunk_tokens=5)),
        tracing_mode="symbolic",
        _allow_non_fake_inputs=True,
    )(*make_traced_inputs(16))
    assert_traced_is_right(traced, head, 16)


@pytest.mark.parametrize("shape_id", ["seq", None])
def test_a_length_of_unknown_value(shape_id):
    """Nothing says that it divides or, without ``shape_id``, that all inputs have the same."""
    head = make_head()
    inputs = make_traced_inputs(16)
    for tensor in inputs:
        mark_unbacked(tensor, 1, hint_override=16, min=8, max=16, shape_id=shape_id)
    traced = minimal_fx_tracer(train_step(make_loss(head, num_chunks=4)), module=head)(*inputs)
    run = run_traced(traced, module=head)
    for length in (16, 8):
        assert_traced_is_right(run, head, length)
    with pytest.raises(RuntimeError, match="expects split_sizes to sum exactly to 10"):
        run(*make_traced_inputs(10))


def test_a_length_of_unknown_value_with_chunk_tokens():
    inputs = make_traced_inputs(16)
    for tensor in inputs:
        mark_unbacked(tensor, 1, hint_override=16, min=8, max=16)
    step = train_step(make_loss(make_head(), chunk_tokens=4))
    with pytest.raises(ValueError, match=r"chunk_tokens \(4\) .* set loss.num_chunks instead"):
        minimal_fx_tracer(step)(*inputs)


def test_a_length_as_the_graph_trainer_marks_it():
    head = make_head()
    inputs = make_traced_inputs(32)
    for tensor in inputs:
        mark_chunk_dynamic_dims(tensor, mode="seq")
    traced = minimal_fx_tracer(train_step(make_loss(head, num_chunks=8)), module=head)(*inputs)
    assert_traced_is_right(run_traced(traced, module=head), head, 32)


# --- what does not depend on the logits, and what is no loss ---


def requires_grad_all_the_same(logits, labels, tokens, **loss_inputs):
    loss, metrics = constant_if_ignored(logits, labels, tokens)
    return loss if loss.requires_grad else torch.zeros((), requires_grad=True), metrics


@pytest.mark.parametrize("hidden_grad", [True, False])
@pytest.mark.parametrize("ignored", [slice(0, 3), slice(6, 8), slice(0, 8)])
def test_a_constant_that_says_that_it_requires_grad(hidden_grad, ignored):
    head = make_head(bias=True)
    hidden, labels, tokens = make_inputs(8, requires_grad=hidden_grad)
    labels[:, ignored] = IGNORE_INDEX
    full_logits(head, hidden, labels, tokens).backward()
    expected = gradients(hidden, head)
    loss_fn = make_loss(head, num_chunks=3, loss_fn=requires_grad_all_the_same)
    loss_fn(hidden, labels, tokens)[0].backward()
    assert_same(gradients(hidden, head), expected)


@pytest.mark.parametrize(
    "returned, found",
    [
        (torch.tensor(1.0), r"a tensor of shape \(\)"),
        (1.0, "float"),
        ((torch.tensor(1.0), {}, {}), "a tuple of a tensor of shape .*, dict, dict"),
        ((torch.ones(3), {}), r"a tuple of a tensor of shape \(3,\), dict"),
        ((1.0, {}), "a tuple of float, dict"),
        (None, "None"),
    ],
)
@pytest.mark.parametrize("from_weight", [False, True])
def test_an_inner_loss_that_returns_something_else(returned, found, from_weight):
    class Wrong(HeadWeightLoss):
        def __init__(self):
            pass

        def __call__(self, *args, **kwargs):
            return returned

    loss_fn = make_loss(make_head(), loss_fn=Wrong() if from_weight else lambda *a, **k: returned)
    with pytest.raises(TypeError, match=rf"returned {found}; expected \(loss, metrics\)"):
        loss_fn(HIDDEN, LABELS)


@pytest.mark.parametrize("head", [lambda x: x, "lm_head"])
def test_a_head_that_is_no_module(head):
    with pytest.raises(TypeError, match="expected the module that owns the head's parameters"):
        make_loss(head)(HIDDEN, LABELS)


def test_labels_and_hidden_states_that_are_no_tensors():
    with pytest.raises(TypeError, match="got None as labels; expected a tensor, token ids"):
        make_loss(make_head())(HIDDEN, None)
    with pytest.raises(TypeError, match="got None as labels 1"):
        make_loss(make_head())((HIDDEN, HIDDEN), (LABELS, None))
    with pytest.raises(TypeError, match="got None as prediction; expected a tensor, hidden states"):
        make_loss(make_head())(None, LABELS)


def test_logits_in_the_place_of_hidden_states():
    head = make_head()
    with pytest.raises(ValueError, match=r"\(2, 8, 32\).*\[B, L, 8\].*_skip_lm_head"):
        make_loss(head)(head(HIDDEN), LABELS)
    with pytest.raises(ValueError, match=r"\(2, 8, 3\).*\[B, L, 8\].*before the head"):
        make_loss(head)(HIDDEN[..., :3], LABELS)


@pytest.mark.parametrize("config", [{"num_chunks": 2}, {"chunk_tokens": 2}])
def test_a_sequence_of_length_0(config):
    with pytest.raises(ValueError, match=r"length 0, .* all ranks alike"):
        make_loss(make_head(), **config)(HIDDEN[:, :0], LABELS[:, :0])

"""Options of a run, and what of them a checkpoint must agree with."""

import dataclasses

import numpy as np
import pytest

from models.data import Corpus
from models.errors import InputError
from models.folder import check_same_run
from models.options import Options, differences, parse_overrides

CORPUS = Corpus(np.zeros(9, np.uint8), np.zeros(1, np.uint8), 1, 10, False, "a" * 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(steps=0), "--steps is at least 1, got 0"),
        (dict(batch=-1), "--batch is at least 1, got -1"),
        (dict(keep=-1), "--keep is at least 0, got -1"),
        (dict(checkpoint_every=-1), "--checkpoint-every is at least 0, got -1"),
        (dict(lr=0.0), "--lr is greater than 0, got 0.0"),
        (dict(lr=float("nan")), "--lr is greater than 0, got nan"),
        (dict(weight_decay=-0.1), "--weight-decay is at least 0"),
        (dict(steps=5, warmup=5), "--warmup is less than --steps, got 5 and 5"),
        (dict(batch=6, accum=4), "--batch is a multiple of --accum, got 6 and 4"),
        (dict(policy="te_v3"), "te_v2"),
        (dict(seq=1025), "--seq is at most the model's max_seq_len, 1024, got 1025"),
        (dict(preset="tinny"), "'dsv3', 'llama3_8b', 'llama3_1b', got 'tinny'.*'tiny'"),
        (dict(overrides={"num_layers": -1}), "num_layers must be greater than 0"),
    ],
)
def test_options_out_of_range_are_refused(changes, message):
    preset = changes.pop("preset", "tiny")
    with pytest.raises(InputError, match=message) as raised:
        Options.of(preset, **changes)
    assert "\n" not in str(raised.value)


def test_a_short_run_of_a_preset_needs_no_warm_up_of_its_own():
    assert Options.of("tiny", steps=5).warmup == 0
    assert Options.of("tiny", steps=50).warmup == 5
    assert Options.of("tiny", steps=50, warmup=7).warmup == 7


def test_overrides_take_the_types_of_the_fields():
    got = parse_overrides(["num_layers=4", "aux-loss-coef=1", "router = softmax", "norm_topk_probs=False"])
    assert got == {"num_layers": 4, "aux_loss_coef": 1.0, "router": "softmax", "norm_topk_probs": False}
    assert isinstance(got["aux_loss_coef"], float)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["num_layer=4"], "Did you mean 'num_layers'"),
        (["num_layers"], "key=value"),
        (["num_layers=4.5"], "--set num_layers takes a whole number, got '4.5'"),
        (["rope_theta=x"], "--set rope_theta takes a number, got 'x'"),
        (["norm_topk_probs=1"], "true or false"),
        (["num_layers=4", "num-layers=5"], "'num_layers' twice"),
    ],
)
def test_bad_overrides_are_refused(texts, message):
    with pytest.raises(InputError, match=message):
        parse_overrides(texts)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (dict(batch=8), "batch was 16, is 8"),
        (dict(seed=1), "seed was 0, is 1"),
        (dict(steps=499), "steps was 500, is 499"),
        (dict(overrides={"num_layers": 2}), "model.num_layers was 3, is 2"),
    ],
)
def test_what_decides_the_weights_decides_the_identity(changes, line):
    saved, now = Options.of("tiny").identity(CORPUS), Options.of("tiny", **changes).identity(CORPUS)
    assert line in differences(saved, now)
    with pytest.raises(InputError, match=line):
        check_same_run("checkpoint 3", saved, now)


def test_a_finished_run_may_take_more_steps():
    saved, more = (Options.of("tiny", steps=steps).identity(CORPUS) for steps in (60, 80))
    assert differences(saved, more) == ["steps was 60, is 80", "warmup was 6, is 8"]
    check_same_run("checkpoint 60", saved, more, done=60)
    for done, now in ((40, more), (None, more), (60, more | {"seed": 1}), (80, more | {"steps": 50})):
        with pytest.raises(InputError, match="steps was 60, is"):
            check_same_run("checkpoint", saved, now, done)
    with pytest.raises(InputError, match="has finished its --steps 60 can be trained further"):
        check_same_run("checkpoint 40", saved, more, done=40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lr=float("inf")), "--lr is a finite number, got inf"),
        (dict(capacity=0.0), "--capacity is greater than 0, got 0.0"),
        (dict(policy="first=4 | te_v2 | save=moe.*"), "first=4 is more than the model's 3 layers"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        Options.of("tiny", **changes)


def test_other_data_is_another_run():
    options = Options.of("tiny")
    other = dataclasses.replace(CORPUS, sha256="b" * 64)
    assert differences(options.identity(CORPUS), options.identity(other)) == [
        "data was aaaaaaaaaaaa..., is bbbbbbbbbbbb..."
    ]


@pytest.mark.parametrize(
    "changes",
    [dict(policy="te_v1"), dict(eval_every=3), dict(checkpoint_every=7), dict(keep=5), dict(keep=0)],
)
def test_what_decides_no_weight_may_change(changes):
    assert (
        differences(Options.of("tiny").identity(CORPUS), Options.of("tiny", **changes).identity(CORPUS)) == []
    )

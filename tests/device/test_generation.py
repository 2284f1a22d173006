"""transformers' `generate` with a static cache is replayed, and gives what it gives without."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import skyward as sky
from skyward.device import generation

transformers = pytest.importorskip("transformers")

WORDS, LONGEST = 97, 64
PAD, BEGIN, END = 0, 1, 5
NEW = 14
AS_IT_IS = {"disable_compile": True}
STATIC = {"cache_implementation": "static"}


def gpt2(**more: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LONGEST, n_embd=16, n_layer=2, n_head=2, **_tokens(), **more
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**more: Any) -> Any:
    config = transformers.LlamaConfig(**_sizes(), **_tokens(), initializer_range=0.3, **more)
    return transformers.LlamaForCausalLM(config)


def _tokens() -> dict[str, int]:
    return {"pad_token_id": PAD, "bos_token_id": BEGIN, "eos_token_id": END}


def _sizes() -> dict[str, int]:
    return {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": LONGEST,
    }


def made(make: Callable[..., Any], device: torch.device, **more: Any) -> Any:
    torch.manual_seed(0)
    return make(**more).eval().to(device)


@pytest.fixture(scope="module")
def model(device: torch.device) -> Any:
    return made(gpt2, device)


@pytest.fixture(scope="module")
def other_model(device: torch.device) -> Any:
    return made(llama, device)


def prompt(device: torch.device, rows: int = 2, length: int = 6) -> torch.Tensor:
    choose = torch.Generator().manual_seed(length)
    return torch.randint(6, WORDS, (rows, length), generator=choose).to(device)


def told(found: Any) -> Any:
    """What `generate` has returned, on the host."""
    if isinstance(found, torch.Tensor):
        return found.tolist()
    if isinstance(found, tuple):
        return [*map(told, found)]
    if hasattr(found, "sequences"):
        names = ("sequences", "scores", "logits")
        layers = found.past_key_values.layers
        cache = [(each.keys, each.values, each.cumulative_length) for each in layers]
        return [told(getattr(found, name)) for name in names], told(tuple(cache))
    return found


def run(model: Any, ids: torch.Tensor, **more: Any) -> tuple[Any, list[float]]:
    """What is generated, and the next random numbers."""
    torch.manual_seed(3)
    wanted = {"max_new_tokens": NEW, "cache_implementation": "static", "do_sample": False}
    if "past_key_values" in more:
        del wanted["cache_implementation"]
    found = model.generate(ids, **{**wanted, **more})
    return told(found), torch.rand(3, device=ids.device).tolist()


def replays(model: Any) -> int:
    """How many tokens of a model were replayed so far, by what is kept of it."""
    return sum(decoder.step.replayed for _, decoder in generation._kept.get(model, []))


def replayed_like_eager(model: Any, ids: torch.Tensor, **more: Any) -> Any:
    """The same, thrice with replay; returns what it is."""
    expected = run(model, ids, **more, **AS_IT_IS)
    generation._kept.pop(model, None)
    for _ in range(3):
        assert run(model, ids, **more) == expected
    assert replays(model)
    return expected[0]


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "of the likeliest": {"do_sample": True, "top_p": 0.9, "top_k": 0, "min_p": 0.01},
    "not repeated": {"do_sample": True, "repetition_penalty": 1.4, "typical_p": 0.9},
    "at least so long": {"min_new_tokens": 5, "eos_token_id": [*range(6, 40)]},
    "no pairs twice": {"no_repeat_ngram_size": 2},
    "without an end": {"eos_token_id": None, "do_sample": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_random_numbers_are_those_without_replay(way: str, model: Any) -> None:
    replayed_like_eager(model, prompt(model.device), **WAYS[way])


@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_rows_of_several_lengths_end_one_after_the_other(way: str, other_model: Any) -> None:
    device, lengths = other_model.device, (7, 4, 2)
    ids, mask = prompt(device, 3, 7), torch.ones(3, 7, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, : 7 - length] = PAD
        mask[row, : 7 - length] = 0
    more = {**WAYS[way], "attention_mask": mask.to(device), "max_new_tokens": 30}
    (free, _) = run(other_model, ids, **more, **AS_IT_IS, eos_token_id=None)
    ends = [row[7 + at] for row, at in zip(free, (4, 9, 14), strict=True)]
    rows = replayed_like_eager(other_model, ids, **more, eos_token_id=ends)
    lasts = [next(at for at, token in enumerate(row) if at > 6 and token in ends) for row in rows]
    assert len({*lasts}) > 1
    assert max(lasts) == len(rows[0]) - 1 < 36


def test_bfloat16_is_replayed(device: torch.device) -> None:
    replayed_like_eager(made(llama, device).to(torch.bfloat16), prompt(device, 1))


def test_modes_of_pytorch_have_memory_of_their_own(model: Any) -> None:
    ids = prompt(model.device)
    expected = replayed_like_eager(model, ids)
    with torch.inference_mode():
        assert replayed_like_eager(model, ids) == expected
    with torch.autocast("sky", torch.bfloat16):
        replayed_like_eager(model, ids)
    assert run(model, ids)[0] == expected


def test_a_second_call_records_nothing(device: torch.device) -> None:
    model, ids = made(gpt2, device), prompt(device)
    for _ in range(2):
        run(model, ids, eos_token_id=None)
    before = replays(model)
    run(model, ids, eos_token_id=None)
    # A shorter prompt fits into the same memory.
    run(model, prompt(device, 2, 4), eos_token_id=None)
    assert replays(model) - before == 2 * (NEW - 1)
    assert len(generation._kept[model]) == 1


def test_calls_of_other_sizes_are_recorded_and_a_few_are_kept(device: torch.device) -> None:
    model = made(gpt2, device)
    for rows in (1, 2, 3, 4, 5):
        expected = run(model, prompt(device, rows), **AS_IT_IS)
        assert [run(model, prompt(device, rows)) for _ in range(2)] == [expected] * 2
    assert len(generation._kept[model]) == generation.KEPT_MOST


def test_numbers_with_a_fraction_may_differ_from_call_to_call(device: torch.device) -> None:
    model, ids = made(gpt2, device), prompt(device)
    for temperature in (0.5, 0.7, 0.9, 1.1):
        more = {"do_sample": True, "temperature": temperature, "max_new_tokens": 30}
        expected = run(model, ids, **more, **AS_IT_IS)
        before = replays(model)
        assert run(model, ids, **more) == expected
    assert replays(model) - before > 15
    assert len(generation._kept[model]) == 1


def test_weights_that_have_changed_are_used(device: torch.device) -> None:
    model, ids = made(gpt2, device), prompt(device)
    before = replayed_like_eager(model, ids)
    with torch.no_grad():
        model.transformer.wte.weight.mul_(-1.5)
    assert replayed_like_eager(model, ids) != before
    model.lm_head.weight = torch.nn.Parameter(torch.randn(WORDS, 16).to(device))
    replayed_like_eager(model, ids)


class Heard(transformers.generation.BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("ends_at", [None, 7])
def test_a_streamer_hears_each_token_in_order(ends_at: int | None, other_model: Any) -> None:
    ids = prompt(other_model.device, 1)
    (row,), _ = run(other_model, ids, eos_token_id=None)
    more = {} if ends_at is None else {"eos_token_id": row[6 + ends_at]}
    heard = [Heard() for _ in range(4)]
    run(other_model, ids, streamer=heard[0], **more, **AS_IT_IS)
    for each in heard[1:]:
        run(other_model, ids, streamer=each, **more)
        assert (each.tokens, each.ends) == (heard[0].tokens, 1)


class Broken(Heard):
    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.tokens) == 4:
            raise ValueError("enough")


def test_a_call_that_fails_leaves_nothing_behind(model: Any) -> None:
    ids = prompt(model.device)
    expected = replayed_like_eager(model, ids)
    with pytest.raises(ValueError, match="enough"):
        run(model, ids, streamer=Broken())
    assert run(model, ids)[0] == expected


def test_what_fails_on_the_device_is_raised_by_the_call(device: torch.device) -> None:
    model, ids = made(gpt2, device), prompt(device)
    more = {"do_sample": True, "eos_token_id": None}
    expected = replayed_like_eager(model, ids, **more)
    weight = model.transformer.ln_f.weight
    with torch.no_grad():
        weight.mul_(float("nan"))
    with pytest.raises(RuntimeError, match="probability tensor contains either"):
        run(model, ids, **more)
    with torch.no_grad():
        weight.fill_(1.0)
    assert run(model, ids, **more)[0] == expected


class Doubtful(transformers.StoppingCriteria):
    """Looks at tokens, and counts how often it is asked."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.lengths.append(input_ids.shape[1])
        return (input_ids[:, -1] % 7 == 0) & (input_ids.shape[1] > 9)


class Picky(transformers.LogitsProcessor):
    """Reads values, and remembers them."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.read.append(input_ids[:, -1].tolist())
        scores = scores.clone()
        scores[:, self.read[-1][0]] += 0.5
        return scores


def test_criteria_and_processors_of_the_users_are_asked_for_each_token_and_no_more(
    model: Any,
) -> None:
    ids, asked = prompt(model.device, 1), []
    for more in (AS_IT_IS, {}, {}):
        criteria, processor = Doubtful(), Picky()
        found = run(
            model,
            ids,
            stopping_criteria=transformers.StoppingCriteriaList([criteria]),
            logits_processor=transformers.LogitsProcessorList([processor]),
            max_new_tokens=30,
            **more,
        )
        asked.append((found, criteria.lengths, processor.read))
    assert asked[0] == asked[1] == asked[2]
    assert replays(model)


def test_the_time_that_it_may_take_is_kept(model: Any) -> None:
    begun = time.monotonic()
    model.generate(
        prompt(model.device),
        max_time=0.2,
        max_new_tokens=50,
        cache_implementation="static",
        streamer=Slow(),
    )
    assert time.monotonic() - begun < 5


class Slow(Heard):
    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        assert len(self.tokens) < 10
        time.sleep(0.05)


def test_scores_and_the_cache_are_returned(other_model: Any) -> None:
    more = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ids = prompt(other_model.device)
    replayed_like_eager(other_model, ids, **more)
    (free, _), _ = run(other_model, ids, eos_token_id=None, **more)
    ends = [row[6 + 4] for row in free[0]]
    (ended, _) = replayed_like_eager(other_model, ids, eos_token_id=ends, **more)
    assert len(ended[1]) == len(ended[0][0]) - 6 < NEW


def test_a_cache_of_the_users_goes_on(model: Any) -> None:
    ids, found = prompt(model.device), []
    for more in (AS_IT_IS, {}, {}):
        cache = transformers.StaticCache(model.config, max_cache_len=40)
        first = model.generate(ids, past_key_values=cache, max_new_tokens=8, **more)
        kept = [told((each.keys, each.cumulative_length)) for each in cache.layers]
        second = model.generate(first, past_key_values=cache, max_new_tokens=8, **more)
        found.append((first.tolist(), kept, second.tolist()))
    assert found[0] == found[1] == found[2]


def test_the_client_waits_a_few_times_for_a_text(device: torch.device) -> None:
    model, ids = made(gpt2, device), prompt(device)
    mask = torch.ones_like(ids)
    for more in ({}, {"do_sample": True}):
        for _ in range(2):
            run(model, ids, attention_mask=mask, max_new_tokens=50, **more)
        before = sky.device_stats(device).waits
        run(model, ids, attention_mask=mask, max_new_tokens=50, **more)
        # What `generate` looks at before it begins, and two for what comes back here.
        assert sky.device_stats(device).waits - before <= 8


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    config.decoder_start_token_id = PAD
    return transformers.T5ForConditionalGeneration(config)


def mistral() -> Any:
    config = transformers.MistralConfig(**_sizes(), **_tokens(), sliding_window=8)
    return transformers.MistralForCausalLM(config)


OTHERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "beams": (gpt2, {"num_beams": 3}),
    "a growing cache": (gpt2, {"cache_implementation": None}),
    "no cache": (gpt2, {"cache_implementation": None, "use_cache": False}),
    "attentions": (llama, {"return_dict_in_generate": True, "output_hidden_states": True}),
    "two texts": (t5, {}),
    "a window": (mistral, {}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_not_replayed_is_as_it_was(kind: str, device: torch.device) -> None:
    make, more = OTHERS[kind]
    model, ids = made(make, device), prompt(device)
    expected = run(model, ids, **more, **AS_IT_IS)[0]
    found = run(model, ids, **more)[0]
    assert str(found) == str(expected)
    assert not replays(model)


def test_hooks_of_the_users_run_for_each_token(device: torch.device) -> None:
    model, calls = made(gpt2, device), []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        run(model, prompt(device), eos_token_id=None)
    assert len(calls) == 2 * NEW
    assert not replays(model)


def test_a_model_that_trains_or_wants_no_replay_keeps_nothing(device: torch.device) -> None:
    model = made(gpt2, device)
    run(model, prompt(device), **AS_IT_IS)
    run(model.train(), prompt(device))
    assert model not in generation._kept


def test_memory_is_given_back_with_the_model(device: torch.device) -> None:
    ids = prompt(device)
    run(made(gpt2, device), ids)
    torch.sky.synchronize(device)  # type: ignore[attr-defined]
    before = torch.sky.memory_allocated(device)  # type: ignore[attr-defined]
    model = made(gpt2, device)
    for _ in range(3):
        run(model, ids)
    assert replays(model)
    known = weakref.ref(model)
    del model
    assert known() is None
    assert torch.sky.memory_allocated(device) == before  # type: ignore[attr-defined]


def test_threads_generate_at_the_same_time(model: Any) -> None:
    prompts = [prompt(model.device, 2, length) for length in (3, 4, 5)]
    expected = [model.generate(ids, max_new_tokens=NEW, **AS_IT_IS, **STATIC) for ids in prompts]
    found: list[list[Any]] = [[], [], []]

    def write(which: int) -> None:
        for _ in range(3):
            ids = prompts[which]
            found[which].append(model.generate(ids, max_new_tokens=NEW, **STATIC).tolist())

    threads = [threading.Thread(target=write, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[each.tolist()] * 3 for each in expected]

"""transformers' `generate` with a static cache: each token is replayed, and few are waited for.

With a static cache nothing grows but the tokens so far, and these are kept here in memory of one
size. So what is done for a token is a function for `sky.replay` without arguments and results: all
that it reads and writes stays on the device. The client asks every few tokens whether all rows
have ended. Meanwhile it goes on, and what was made behind the end is dropped.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from skyward.device.core import core
from skyward.device.libraries import Patches, wrap
from skyward.device.replay import Replay, replay
from skyward.device.replay.surroundings import SCALARS

REPLAYED = frozenset(
    {
        *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"),
        *("TypicalLogitsWarper", "EpsilonLogitsWarper", "LogitNormalization"),
        *("InfNanRemoveLogitsProcessor", "RepetitionPenaltyLogitsProcessor"),
    }
)
"""Processors of scores that do the same for each token: they are a part of what is replayed."""
HARMLESS = frozenset(
    {
        *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "EtaLogitsWarper"),
        *("NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "TopHLogitsWarper"),
        *("NoBadWordsLogitsProcessor", "ForcedBOSTokenLogitsProcessor"),
        *("ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty"),
        *("SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor"),
    }
)
"""Those that run as they are, and may run behind the end: they keep nothing between tokens."""
GROWING = ("attention_mask", "position_ids", "token_type_ids")
"""Arguments of the model with a column for each token."""
KNOWN = frozenset({*GROWING, "past_key_values", "use_cache", "logits_to_keep"})
GENERAL = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")
"""A model with one of these of its own generates as it does elsewhere."""
KEPT_MOST = 4
"""For so many kinds of generation a model has memory and recordings at a time."""
REPORT_SECONDS = 0.01
REPORT_TOKENS_MOST = 16
AHEAD_MOST = 128
PATIENCE_SECONDS = 1.0
"""A report that takes longer is asked for; that also raises what has failed."""


@functools.cache
def install() -> None:
    """Patch transformers, or do so when it is imported; once per process."""
    Patches({"transformers.generation.utils": _patch}).install()


def _patch(module: ModuleType) -> None:
    """Patch what `generate` calls for greedy search and for sampling, and before that."""
    mixin = module.GenerationMixin
    wrap(mixin, "_prepare_special_tokens", _on_the_host)
    if not hasattr(mixin, "_prefill"):
        return  # before transformers 5, the length of a static cache is counted by the client

    def sample(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def replayed(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["input_ids"].device.type == "sky":
                asked = _Generation(module, bound.arguments)
                if asked.is_ours():
                    return asked.result()
            return original(*args, **kwargs)

        return replayed

    wrap(mixin, "_sample", sample)


def _on_the_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Look at numbers of tokens before they are on the device: afterwards, each look is a wait."""
    signature = inspect.signature(original)

    def prepare(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        device = bound.arguments.get("device")
        if getattr(device, "type", None) != "sky":
            return original(*args, **kwargs)
        bound.arguments["device"] = "cpu"
        made = original(*bound.args, **bound.kwargs)
        config = bound.arguments["generation_config"]
        for name, value in list(vars(config).items()):
            if name.endswith("_token_tensor") and value is not None:
                setattr(config, name, value.to(device, non_blocking=True))
        return made

    return prepare


def _is_one_of(thing: Any, names: Collection[str]) -> bool:
    """Whether it is of one of these classes of transformers, and of none derived from them."""
    kind = type(thing)
    return kind.__name__ in names and kind.__module__.startswith("transformers.generation.")


class _Generation:
    """One call of `generate`."""

    def __init__(self, module: ModuleType, given: dict[str, Any]) -> None:
        self._module, self._given = module, given
        self.model, self.ids = given["self"], given["input_ids"]
        self.config, self.streamer = given["generation_config"], given["streamer"]
        self.processors, self.criteria = given["logits_processor"], given["stopping_criteria"]
        self._kwargs = dict(given["model_kwargs"])
        self.cache: Any = self._kwargs.get("past_key_values")
        self.is_whole = all(map(_is_replayed, self.processors))
        eos = [each for each in self.criteria if _is_one_of(each, ("EosTokenCriteria",))]
        self.eos: Any = eos[0].eos_token_id.to(self.ids.device) if len(eos) == 1 else None
        known = ("EosTokenCriteria", "MaxLengthCriteria")
        self.others = [each for each in self.criteria if not _is_one_of(each, known)]
        self.waits_for_each = bool(self.others) or not all(
            _is_replayed(each) or _is_one_of(each, HARMLESS) for each in self.processors
        )
        wanted = self.config.return_dict_in_generate
        self.wants_scores = bool(wanted and self.config.output_scores)
        self.wants_logits = bool(wanted and self.config.output_logits)
        self.is_alone = True
        """Whether no other thread generates meanwhile."""
        self.is_cache_seen = bool(wanted or getattr(self.cache, "_is_user_defined", False))

    def is_ours(self) -> bool:
        """Whether it is known that a replay does the same as `generate`."""
        import torch

        config, model, kind = self.config, self.model, type(self.model)
        mixin, most = self._module.GenerationMixin, self.criteria.max_length
        is_attention_wanted = config.output_attentions or config.output_hidden_states
        return (
            model.device == self.ids.device
            and self.ids.dtype == torch.long
            and len(set((getattr(model, "hf_device_map", None) or {}).values())) < 2
            and not (torch.is_grad_enabled() or model.training or config.is_assistant)
            and getattr(model, "hf_quantizer", None) is None
            and not _has_python_of_the_users(model)
            and not (config.disable_compile or config.compile_config or self._given["synced_gpus"])
            and not (config.return_dict_in_generate and is_attention_wanted)
            and all(getattr(kind, name) is getattr(mixin, name, None) for name in GENERAL)
            and KNOWN.issuperset(self._kwargs)
            and self._kwargs.get("use_cache") is True
            and _is_static(self.cache)
            and self.ids.dim() == 2
            and most is not None
            and self.ids.shape[1] < most <= self.cache.layers[0].max_cache_len + 1
            and sum(hasattr(each, "eos_token_id") for each in self.criteria)
            == (self.eos is not None)
            and (self.eos is None or config._pad_token_tensor is not None)
        )

    def result(self) -> Any:
        """What `generate` returns."""
        kind = self._kind()
        decoder = _take(self.model, kind)
        if decoder is None:
            cache = copy.deepcopy(self.cache) if self.is_cache_seen else self.cache
            decoder = _Decoder(self, cache)
        else:
            decoder.renew(self)
        with _lock:
            for other in _running:
                other.is_alone = self.is_alone = False
            _running.append(self)
        try:
            made = self._generate(decoder)
        finally:
            with _lock:
                _running.remove(self)
        _put_back(self.model, kind, decoder)
        return made

    def _kind(self) -> Any:
        """What the memory and the recordings of a decoder are for."""
        import torch

        shapes = [
            None if given is None else (given.shape[:-1], given.dtype)
            for given in map(self._kwargs.get, GROWING)
        ]
        modes = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("sky")
        return (
            # A device that was lost and is back has nothing of what was kept there.
            (self.ids.shape[0], self.ids.device, core().openings[self.ids.device.index]),
            (*modes, torch.get_autocast_dtype("sky")),
            (self.cache.layers[0].max_cache_len, self.model.dtype),
            (self._kwargs.get("logits_to_keep"), *shapes),
            None if self.eos is None else len(self.eos),
            (self.config.do_sample, self.wants_scores, self.wants_logits),
            tuple(map(_settings, self.processors)) if self.is_whole else None,
        )

    def _generate(self, decoder: _Decoder) -> Any:
        import torch

        model, config, device = self.model, self.config, self.ids.device
        length = self.ids.shape[1]
        state = None
        if config.do_sample and self.eos is not None:
            state = torch.sky.get_rng_state(device)  # type: ignore[attr-defined]
        kwargs = {**self._kwargs, "past_key_values": decoder.cache}
        outputs = model._prefill(self.ids, config, kwargs)
        kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
        decoder.begin(self, kwargs)
        optimized: Callable[[], AbstractContextManager[Any]]
        optimized = getattr(model, "_optimize_model_for_decode", nullcontext)
        with optimized():
            made = _Tokens(self, decoder, outputs.logits)
            del outputs  # the scores of the whole prompt
            count = made.all()
        if state is not None and made.issued > count and self.is_alone:
            # As if nothing had been drawn behind the end. What others draw is not taken back.
            torch.sky.set_rng_state(state, device)  # type: ignore[attr-defined]
            for _ in range(count):
                decoder.draw()
        ids = decoder.ids[:, : length + count].clone()
        for each in self.criteria:
            if _is_one_of(each, ("MaxLengthCriteria",)):
                each(ids[:, :-1], None)  # it warns of a text that is longer than the model knows
        if self.is_cache_seen:
            decoder.copy_cache(self.cache, made.issued - count)
        if self.streamer is not None:
            self.streamer.end()
        if not config.return_dict_in_generate:
            return ids
        return self._module.GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=tuple(made.scores[:count]) if self.wants_scores else None,
            logits=tuple(made.logits[:count]) if self.wants_logits else None,
            past_key_values=self.cache,
        )


class _Tokens:
    """The new tokens of one call."""

    def __init__(self, asked: _Generation, decoder: _Decoder, first: Any) -> None:
        self._asked, self._decoder, self._first = asked, decoder, first
        self._begin = asked.ids.shape[1]
        self._most = asked.criteria.max_length - self._begin
        self.issued = 0
        """How many were made, also behind the end."""
        self.scores: list[Any] = []
        self.logits: list[Any] = []

    def all(self) -> int:
        """Make them until all rows have ended; returns how many count."""
        asked, decoder = self._asked, self._decoder
        pace = decoder.pace
        if asked.waits_for_each:
            pace = _Pace(1, 1)
        elif asked.eos is None and asked.streamer is None:
            # Then the only question is whether something has failed.
            pace = _Pace(self._most, self._most)
        pace.begin()
        reports: deque[_Report] = deque()
        reported = known = 0
        while True:
            if self.issued - reported >= min(pace.every, self._most - reported) > 0:
                columns = slice(self._begin + reported, self._begin + self.issued)
                is_heard = asked.streamer is not None
                reports.append(_Report(decoder, columns if is_heard else None, self.issued))
                reported = self.issued
            is_free = self.issued < self._most and self.issued - known < pace.ahead
            if is_free and not (reports and reports[0].has_arrived()):
                self._make()
                continue
            report = reports.popleft()
            live, is_over, tokens = report.read()
            for each in tokens[: live - known]:
                asked.streamer.put(each)
            known = report.count
            if is_over or known == self._most:
                return live
            pace.note(report)

    def _make(self) -> None:
        """One token for each row."""
        asked, decoder = self._asked, self._decoder
        if self.issued:
            logits, scores = decoder.step()
        else:
            logits, scores = decoder.first(self._first)
            self._first = None
        if not asked.is_whole:
            scores = asked.processors(decoder.ids[:, : self._begin + self.issued], logits)
            decoder.choose(scores)
        self.issued += 1
        if asked.wants_scores:
            self.scores.append(scores)
        if asked.wants_logits:
            self.logits.append(logits)
        for each in asked.others:
            scores = tuple(self.scores) if asked.wants_scores else None
            has_ended = each(decoder.ids[:, : self._begin + self.issued], scores)
            decoder.unfinished.logical_and_(~has_ended)


class _Report:
    """How far the worker is, as the client is told of it while it goes on."""

    def __init__(self, decoder: _Decoder, columns: slice | None, count: int) -> None:
        import torch

        self.count = count
        """How many tokens were issued."""
        # What has failed has spoilt the tokens, which is noticed when one of them is asked for.
        parts = [decoder.live, decoder.unfinished.max().view(1), decoder.ids[0, :1]]
        if columns is not None:
            parts.append(decoder.ids[:, columns].t().reshape(-1))
        there = torch.cat(parts)
        self._device, self._rows = there.device, len(decoder.ids)
        # Tokens and counts are not negative: what is there without one has arrived.
        self._here = torch.full(there.shape, -1, dtype=there.dtype, pin_memory=True)
        self._here.copy_(there, non_blocking=True)
        self._seen: list[int] = []
        self.begun = time.perf_counter()

    def has_arrived(self) -> bool:
        """Whether all of it is there."""
        before, self._seen = self._seen, self._here.tolist()
        return min(self._seen) >= 0 and self._seen == before

    def read(self) -> tuple[int, bool, list[Any]]:
        """Wait for it: how many tokens count, whether all rows have ended, and the tokens."""
        import torch

        pause = 2e-5
        while not self.has_arrived():
            if time.perf_counter() - self.begun > PATIENCE_SECONDS:
                torch.accelerator.synchronize(self._device)
                self._seen = self._here.tolist()
                break
            time.sleep(pause)
            pause = min(1.2 * pause, 1e-3)
        live, unfinished, _, *tokens = self._seen
        rows = torch.tensor(tokens, dtype=torch.long).view(-1, self._rows)
        return live, not unfinished, [*rows]


class _Pace:
    """How often the client asks how far the worker is, and how far it goes on meanwhile.

    As far as the worker gets in a round trip, so that it has always something to do, and not
    further: what is made behind the end is for nothing.
    """

    def __init__(self, every: int, ahead: int) -> None:
        self.every, self.ahead = every, ahead
        self._is_fixed = every == ahead
        self._seconds = self._round_trip = 0.0
        self._last: tuple[float, int] | None = None

    def begin(self) -> None:
        """The worker is given a prompt, and has nothing else to do."""
        self._last = None

    def note(self, report: _Report) -> None:
        """A report was read."""
        now = time.perf_counter()
        last, self._last = self._last, (now, report.count)
        if self._is_fixed:
            return
        if last is None:
            taken = now - report.begun
            self._round_trip = min(taken, self._round_trip or taken)
            return
        seconds = max(now - last[0], 1e-6) / (report.count - last[1])
        self._seconds = (seconds + (self._seconds or seconds)) / 2
        self.every = min(max(1, int(REPORT_SECONDS / self._seconds)), REPORT_TOKENS_MOST)
        self.ahead = self.every + 1 + min(int(self._round_trip / self._seconds), AHEAD_MOST)


def _has_python_of_the_users(model: Any) -> bool:
    """Whether something besides the model's own code is to run for each token."""
    from torch.nn.modules import module as every

    hooks = [every._global_forward_hooks, every._global_forward_pre_hooks]
    for each in model.modules():
        if "forward" in vars(each):
            return True  # compiled, or brought to another device where it is needed
        hooks += [each._forward_hooks, each._forward_pre_hooks]
    found = (hook for some in hooks for hook in some.values())
    return any(not _is_of_transformers(hook) for hook in found)


def _is_of_transformers(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def _is_replayed(processor: Any) -> bool:
    return (
        _is_one_of(processor, REPLAYED)
        and not getattr(processor, "prompt_ignore_length", None)
        and all(isinstance(value, SCALARS) for value in vars(processor).values())
    )


def _settings(processor: Any) -> Any:
    """What a processor is, but for numbers with a fraction: `sky.replay` sends those along."""
    kept = [(name, value) for name, value in vars(processor).items() if type(value) is not float]
    return type(processor), tuple(kept)


def _is_static(cache: Any) -> bool:
    return (
        _is_named(cache, "StaticCache")
        and not getattr(cache, "offloading", False)
        and all(_is_named(each, "StaticLayer") for each in cache.layers)
        and all(hasattr(each.cumulative_length, "add_") for each in cache.layers)
    )


def _is_named(thing: Any, name: str) -> bool:
    return type(thing).__name__ == name and type(thing).__module__ == "transformers.cache_utils"


class _Decoder:
    """The memory of one kind of generation, and what is done in it for each token."""

    step: Replay[[], tuple[Any, Any]]
    """Make the next token; returns the model's logits and the scores, where they are wanted."""
    choose: Callable[[Any], None]
    """Take the next token by its scores."""

    def __init__(self, asked: _Generation, cache: Any) -> None:
        self.cache = cache
        self.pace = _Pace(1, 2)
        self._processors = copy.copy(asked.processors)
        self._processors[:] = map(copy.copy, asked.processors) if asked.is_whole else []
        self._kwargs: dict[str, Any] = {}

    def renew(self, asked: _Generation) -> None:
        """Be as at the beginning, for another call of the same kind."""
        self.cache.reset()
        for ours, theirs in zip(self.cache.layers, asked.cache.layers, strict=True):
            if theirs.is_initialized:
                _copy_layer(ours, theirs)
            else:
                # As long as it has no memory, a layer's length is a number and no tensor.
                ours.is_initialized = False
                ours.lazy_initialization = functools.partial(_use_memory, ours)
        for mine, its in zip(self._processors, asked.processors, strict=False):
            vars(mine).update(vars(its))

    def begin(self, asked: _Generation, kwargs: dict[str, Any]) -> None:
        """Take the prompt, which the cache has already, and what else the model is given."""
        import torch

        given, longest = dict(kwargs), self.cache.layers[0].max_cache_len
        if (mask := given.get("attention_mask")) is not None:
            # What is not there yet is hidden by its position, whatever the mask says of it.
            rest = mask.new_ones(len(mask), longest - mask.shape[1])
            given["attention_mask"] = torch.cat([mask, rest], -1)
        for name in GROWING[1:]:
            if given.get(name) is not None:
                given[name] = given[name][..., -1:].clone()
        if self._kwargs:
            for name in GROWING:
                if given.get(name) is not None:
                    self._kwargs[name].copy_(given[name])
        else:
            self._kwargs = given
            self._allocate(asked, longest + 1)
        length = asked.ids.shape[1]
        self.ids[:, :length] = asked.ids
        # Who penalizes the tokens that are there does not mind that one is there twice.
        self.ids[:, length:] = asked.ids[:, :1]
        self._at.fill_(length)
        self.live.zero_()
        self.unfinished.fill_(1)
        if asked.eos is not None:
            self._eos.copy_(asked.eos)
            self._pad.copy_(asked.config._pad_token_tensor)

    def _allocate(self, asked: _Generation, longest: int) -> None:
        """Make the memory besides the cache, and the functions that work on it."""
        rows, has_eos = len(asked.ids), asked.eos is not None
        self.ids = ids = asked.ids.new_empty(rows, longest)
        self.live = live = asked.ids.new_empty(1)
        self.unfinished = unfinished = asked.ids.new_empty(rows)
        self._at = at = asked.ids.new_empty(1)
        self._eos = eos = asked.ids.new_empty(len(asked.eos) if has_eos else 0)
        self._pad = pad = asked.ids.new_empty(())
        token = asked.ids.new_empty(rows, 1)
        processors, kwargs, is_whole = self._processors, self._kwargs, asked.is_whole
        does_sample = asked.config.do_sample
        wants_logits = asked.wants_logits or not is_whole
        wants_scores = asked.wants_scores and is_whole
        # The model's parts and not the model: it is gone as soon as the user lets go of it.
        model_of, parts = weakref.ref(asked.model), (vars(asked.model), type(asked.model))

        def choose(scores: Any) -> None:
            import torch

            if does_sample:
                tokens = torch.multinomial(torch.softmax(scores, -1), 1).squeeze(1)
            else:
                tokens = torch.argmax(scores, -1)
            live.add_(unfinished.max())
            if has_eos:
                tokens = tokens * unfinished + pad * (1 - unfinished)
                unfinished.logical_and_(~torch.isin(tokens, eos))
            token.copy_(tokens[:, None])
            ids.index_copy_(1, at, token)
            at.add_(1)

        def scored(logits: Any) -> tuple[Any, Any]:
            import torch

            logits = logits[:, -1].to(copy=True, dtype=torch.float32)
            scores = logits
            if is_whole:
                scores = processors(ids, logits)
                choose(scores)
            return logits if wants_logits else None, scores if wants_scores else None

        def step(_parts: Any = parts) -> tuple[Any, Any]:
            model: Any = model_of()
            given = model.prepare_inputs_for_generation(token, next_sequence_length=1, **kwargs)
            found = scored(model(**given, return_dict=True).logits)
            if kwargs.get("position_ids") is not None:
                kwargs["position_ids"].add_(1)
            return found

        self.choose, self._scored, self.step = choose, scored, replay(step)

    def first(self, logits: Any) -> tuple[Any, Any]:
        """As `step`, from what the model has made of the prompt."""
        self._drawn = len(self.ids), logits.shape[-1]
        return self._scored(logits)

    def draw(self) -> None:
        """Draw as many random numbers as for a token, for nothing."""
        import torch

        torch.empty(self._drawn, dtype=torch.float32, device=self.ids.device).exponential_()

    def copy_cache(self, cache: Any, extra: int) -> None:
        """Have the user's cache be as it is after the last token that counts."""
        import torch

        for ours, theirs in zip(self.cache.layers, cache.layers, strict=True):
            if not theirs.is_initialized:
                theirs.lazy_initialization(ours.keys[:, :, :1], ours.values[:, :, :1])
            _copy_layer(theirs, ours)
            theirs.cumulative_length.sub_(extra)
            behind = theirs.cumulative_length + torch.arange(extra, device=self.ids.device)
            theirs.keys.index_fill_(2, behind, 0)
            theirs.values.index_fill_(2, behind, 0)


def _use_memory(layer: Any, *states: Any) -> None:
    """Take the memory of the layer's for new."""
    layer.is_initialized = True
    del layer.lazy_initialization


def _copy_layer(to: Any, layer: Any) -> None:
    to.keys.copy_(layer.keys)
    to.values.copy_(layer.values)
    to.cumulative_length.copy_(layer.cumulative_length)


_kept: weakref.WeakKeyDictionary[Any, list[tuple[Any, _Decoder]]] = weakref.WeakKeyDictionary()
"""Decoders of models that were used before, the last used last."""
_running: list[_Generation] = []
_lock = threading.Lock()


def _take(model: Any, kind: Any) -> _Decoder | None:
    """A decoder that nobody uses."""
    with _lock:
        kept = _kept.get(model, [])
        for at, (each, decoder) in enumerate(kept):
            if each == kind:
                del kept[at]
                return decoder
    return None


def _put_back(model: Any, kind: Any, decoder: _Decoder) -> None:
    with _lock:
        kept = _kept.setdefault(model, [])
        kept.append((kind, decoder))
        del kept[:-KEPT_MOST]

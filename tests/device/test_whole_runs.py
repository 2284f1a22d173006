"""Whole programs of the libraries people train with, on the device as on the local CPU.

Models are tiny and made from configurations: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..conftest import only_in_all

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
WORDS = ["<pad>", "<unk>", "<end>", "the", "sky", "is", "blue", "and", "so", "sea"]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    # A CPU without bfloat16 of its own computes it another way, and says so.
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning"),
]


@pytest.fixture(autouse=True)
def current(device: torch.device) -> Iterator[None]:
    """The device is the current one, and accelerate starts anew."""
    from accelerate.state import AcceleratorState, GradientState

    for state in (AcceleratorState, GradientState):
        state._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    with torch.sky.device(device):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def gpt2(dropout: float = 0.0, layers: int = 1) -> Any:
    """A language model; the same weights each time."""
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    tokens = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop, **tokens))


def sentences() -> list[dict[str, list[int]]]:
    rows = [[(7 * row + 3 * column) % 60 for column in range(8)] for row in range(16)]
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", eos_token="<end>"
    )


# transformers.


def trainer(folder: Path, model: Any, **more: Any) -> Any:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **more,
    }
    rows = sentences()
    arguments = transformers.TrainingArguments(**settings)
    return transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)


def losses(run: Any) -> list[float]:
    history = run.state.log_history
    return [entry[name] for entry in history for name in ("loss", "eval_loss") if name in entry]


@only_in_all
def test_a_trainer_trains_on_the_device_as_on_the_cpu(device: torch.device, tmp_path: Path) -> None:
    ours = trainer(tmp_path / "ours", gpt2(), save_strategy="no")
    ours.train()
    right = trainer(tmp_path / "right", gpt2(), save_strategy="no", use_cpu=True)
    right.train()
    assert ours.args.device == ours.model.device == device
    assert len(losses(ours)) == 6
    assert losses(ours) == pytest.approx(losses(right), rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=only_in_all)])
def test_a_resumed_trainer_ends_where_an_undisturbed_one_ends(
    tmp_path: Path, precision: str
) -> None:
    """With dropout, so that the generator on the worker has to go on where it was."""
    whole = trainer(tmp_path / "whole", gpt2(dropout=0.2), **{precision: True})
    whole.train()
    resumed = trainer(tmp_path / "resumed", gpt2(dropout=0.2), **{precision: True})
    torch.sky.manual_seed(77)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    state = whole.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, state[name]), name


GENERATED = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "with a static cache": {"do_sample": False, "cache_implementation": "static"},
}


@pytest.mark.parametrize("how", GENERATED)
def test_text_is_generated_as_on_the_cpu(device: torch.device, how: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        eos_token_id=None,
        pad_token_id=2,
    )
    model, generated = transformers.LlamaForCausalLM(config).eval(), []
    for where in (CPU, device):
        torch.manual_seed(1)
        ids = IDS.to(where)
        new = model.to(where).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, **GENERATED[how]
        )
        assert new.device == where
        generated.append(new.tolist())
    assert generated[0] == generated[1]


def test_a_pipeline_runs_on_the_device(device: torch.device, tokenizer: Any) -> None:
    def said(**more: Any) -> tuple[torch.device, str]:
        pipe = transformers.pipeline("text-generation", model=gpt2(), tokenizer=tokenizer, **more)
        prompt = {"max_new_tokens": 3, "do_sample": False}
        return pipe.device, pipe("the sky is", **prompt)[0]["generated_text"]

    right = said(device="cpu")
    assert right[0] == CPU
    assert said() == said(device=device.index) == (device, right[1])


def test_device_map_auto_places_a_model_on_the_device(device: torch.device, tmp_path: Path) -> None:
    model = gpt2().eval()
    model.save_pretrained(tmp_path)
    right = model(IDS).logits
    for place in ("auto", device, str(device)):
        again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, device_map=place)
        assert {p.device for p in again.parameters()} == {device}
        torch.testing.assert_close(again(IDS.to(device)).logits.cpu(), right)


@pytest.mark.filterwarnings("ignore::UserWarning:accelerate")
def test_layers_that_do_not_fit_stay_here_until_they_are_needed(
    device: torch.device, tmp_path: Path
) -> None:
    model = gpt2(layers=2).eval()
    model.save_pretrained(tmp_path)
    memory = {device.index: "22KB", "cpu": "1GB"}
    split = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path, device_map="auto", max_memory=memory
    )
    assert set(split.hf_device_map.values()) == {device.index, "cpu"}
    torch.testing.assert_close(split(IDS.to(device)).logits.cpu(), model(IDS).logits)


# accelerate.


def accelerated(folder: Path, device: torch.device, **how: Any) -> tuple[list[float], list[float]]:
    """Losses of a loop, and of its second half again after its state was loaded."""
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, **how)
    assert accelerator.device == device
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    def epoch() -> list[float]:
        seen = []
        for x, y in loader:
            assert x.device == device
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen.append(accelerator.gather(loss.detach()).item())
        return seen

    first = epoch()
    accelerator.save_state(str(folder))
    second = epoch()
    accelerator.load_state(str(folder))
    assert epoch() == second
    assert accelerator.unwrap_model(model)[0].weight.device == device
    return first, second


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_loop_with_accelerate_goes_on_from_its_saved_state(
    device: torch.device, tmp_path: Path, precision: str
) -> None:
    first, second = accelerated(tmp_path, device, mixed_precision=precision)
    assert len(first) == len(second) == 4
    assert first != second


def test_a_loop_with_accelerate_computes_as_on_the_cpu(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.state import AcceleratorState

    # Dropout draws from another generator on either side.
    monkeypatch.setattr(torch.nn, "Dropout", lambda p: torch.nn.Identity())
    ours = accelerated(tmp_path / "ours", device)
    AcceleratorState._reset_state(reset_partial_state=True)
    right = accelerated(tmp_path / "right", CPU, cpu=True)
    assert ours[0] == pytest.approx(right[0], rel=1e-5)
    assert ours[1] == pytest.approx(right[1], rel=1e-5)


# peft, trl, diffusers, timm.


def test_adapters_are_trained_saved_loaded_and_merged(device: torch.device, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def trained(where: torch.device) -> tuple[Any, torch.Tensor]:
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(gpt2(), config).to(where)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-1)
        ids = IDS.to(where)
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, model.eval()(input_ids=ids).logits.cpu()

    model, ours = trained(device)
    _, right = trained(CPU)
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(gpt2().to(device), tmp_path).eval()
    assert {p.device for p in loaded.parameters()} == {device}
    torch.testing.assert_close(loaded(input_ids=IDS.to(device)).logits.cpu(), ours)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(IDS.to(device)).logits.cpu(), ours, rtol=1e-4, atol=1e-5)


@only_in_all
def test_a_model_is_fine_tuned_with_trl(
    device: torch.device, tmp_path: Path, tokenizer: Any
) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    texts = datasets.Dataset.from_dict({"text": ["the sky is blue", "and so is the sea"] * 4})

    def run(**how: Any) -> Any:
        settings = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1}
        quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_length": 16}
        config = trl.SFTConfig(str(tmp_path), **settings, **quiet, **how)
        made = trl.SFTTrainer(
            model=gpt2(), args=config, train_dataset=texts, processing_class=tokenizer
        )
        made.train()
        return made

    plain = {"bf16": False, "dataloader_pin_memory": False}
    ours = run(**plain)
    assert ours.model.device == device
    assert losses(ours) == pytest.approx(losses(run(**plain, use_cpu=True)), rel=1e-5)


@only_in_all
def test_trl_trains_with_bfloat16_unless_told_otherwise(
    device: torch.device, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    config = trl.SFTConfig(str(tmp_path), report_to=[])
    assert (config.bf16, config.device) == (True, device)


@only_in_all
def test_an_image_is_denoised_from_noise_of_the_cpu(device: torch.device) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    steps = diffusers.DDPMScheduler(num_train_timesteps=10)
    pipe = diffusers.DDPMPipeline(unet, steps)
    pipe.set_progress_bar_config(disable=True)
    images = []
    for where in (CPU, device):
        noise = torch.Generator().manual_seed(3)
        how = {"generator": noise, "num_inference_steps": 2, "output_type": "np"}
        images.append(torch.from_numpy(pipe.to(where)(**how).images))
    assert pipe.device == device
    torch.testing.assert_close(images[1], images[0])
    unet(torch.randn(1, 1, 8, 8, device=device), 1).sample.square().mean().backward()
    assert all(p.grad is not None and p.grad.device == device for p in unet.parameters())


def test_a_model_of_timm_computes_as_on_the_cpu(device: torch.device) -> None:
    reason = "timm imports torchvision, which is not installed"
    timm = pytest.importorskip("timm", reason=reason, exc_type=ImportError)
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=4).eval()
    x = torch.randn(1, 3, 32, 32)
    right = model(x)
    torch.testing.assert_close(model.to(device)(x.to(device)).cpu(), right, rtol=1e-4, atol=1e-4)


# torch's own that look at the kind of a device.


@only_in_all
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo")
def test_flex_attention_computes_as_on_the_cpu(device: torch.device) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(score: Any, batch: Any, head: Any, at: Any, to: Any) -> Any:
        return torch.where(at >= to, score, -float("inf"))

    torch.manual_seed(0)
    here = torch.randn(1, 2, 16, 8)
    right = torch.nn.functional.scaled_dot_product_attention(here, here, here, is_causal=True)
    x = here.to(device).requires_grad_()
    ours = flex_attention(x, x, x, score_mod=causal)
    torch.testing.assert_close(ours.cpu(), right, rtol=1e-5, atol=1e-5)
    mask = create_block_mask(lambda b, h, at, to: at >= to, 1, 1, 16, 16, device=device)
    masked = flex_attention(x, x, x, block_mask=mask)
    torch.testing.assert_close(masked.cpu(), right, rtol=1e-5, atol=1e-5)
    ours.sum().backward()
    assert x.grad is not None
    wanted = torch.autograd.grad(
        torch.nn.functional.scaled_dot_product_attention(
            *(leaf := [here.clone().requires_grad_()]) * 3, is_causal=True
        ).sum(),
        leaf,
    )[0]
    torch.testing.assert_close(x.grad.cpu(), wanted, rtol=1e-4, atol=1e-5)


DISTRIBUTIONS: dict[str, Any] = {
    "Normal": ([0.0, 1.0], [1.0, 2.0]),
    "Gamma": ([1.0, 2.0], [1.0, 3.0]),
    "Beta": ([1.0, 2.0], [2.0, 3.0]),
    "Dirichlet": ([1.0, 2.0, 3.0],),
    "Categorical": ([0.1, 0.2, 0.7],),
    "Poisson": ([1.0, 4.0],),
    "MultivariateNormal": ([0.0, 1.0], [[2.0, 0.5], [0.5, 1.0]]),
    "StudentT": ([3.0, 5.0],),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_draw_and_judge_as_on_the_cpu(device: torch.device, name: str) -> None:
    drawn, judged = [], []
    for where in (CPU, device):
        numbers = [torch.tensor(values, device=where) for values in DISTRIBUTIONS[name]]
        made = getattr(torch.distributions, name)(*numbers)
        torch.manual_seed(5)
        drawn.append(made.sample((3,)).cpu())
        judged.append(made.log_prob(drawn[0].to(where)).cpu())
    assert torch.equal(drawn[0], drawn[1])
    torch.testing.assert_close(judged[1], judged[0])

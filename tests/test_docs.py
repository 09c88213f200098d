"""The documentation says nothing that is not so: links, commands, files, tables and examples."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import torch
from pydantic import BaseModel

from megabench import get_backend
from megabench.backends import Backend, backend_specs
from megabench.backends.flashmla.schemas import SCHEMAS
from megabench.cases import AXES, FAMILIES, CaseError, Sink, load_suite, packaged_suites
from megabench.cli import cli
from megabench.geometry import Geometry, cos_sin_cache
from megabench.results import schema
from reference.linear import linear

ROOT = Path(__file__).resolve().parent.parent
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FOREIGN_OPTIONS = {"--no-deps", "--junitxml", "--dist", "--case-timeout"}
"""Options of other programs that stand alone in a code span."""

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

every_doc = pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose(text: str) -> str:
    return FENCE.sub("", text)


def snippets(text: str, language: str) -> list[str]:
    return [body for _, found, body in FENCE.findall(text) if found == language]


def commands(text: str) -> list[str]:
    """Lines of code blocks and code spans that run a program."""
    lines = [line for _, found, body in FENCE.findall(text) for line in body.splitlines()]
    spans = SPAN.findall(prose(text))
    return [line.strip().removeprefix("$ ") for line in [*lines, *spans]]


def anchors(path: Path) -> set[str]:
    """Heading slugs as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", prose(path.read_text(encoding="utf-8")), re.M):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.replace(" ", "-"))
    return found


# ---- links, files, commands -------------------------------------------------


@every_doc
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    for target in LINK.findall(prose(path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        leads_to = (path.parent / file).resolve() if file else path
        assert leads_to.exists(), f"{path.name}: {target}"
        if anchor:
            assert anchor in anchors(leads_to), f"{path.name}: {target}"


@every_doc
def test_every_source_file_named_exists(path: Path) -> None:
    roots = (ROOT, ROOT / "megabench", ROOT / "megabench" / "backends", ROOT / "docs")
    for span in SPAN.findall(prose(path.read_text(encoding="utf-8"))):
        if re.fullmatch(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|yaml|json|cu|cuh|md)", span):
            assert any((root / span).exists() for root in roots), f"{path.name}: {span}"


@every_doc
def test_every_make_target_named_exists(path: Path) -> None:
    targets = set(re.findall(r"^(\w+):", text_of("Makefile"), re.M))
    for command in commands(path.read_text(encoding="utf-8")):
        if found := re.match(r"make (\w+)", command):
            assert found[1] in targets, f"{path.name}: {command}"


@every_doc
def test_every_megabench_command_and_option_named_exists(path: Path) -> None:
    for command in commands(path.read_text(encoding="utf-8")):
        words = command.split("#")[0].split()
        if words[:1] == ["megabench"] and len(words) > 1:
            check_command(words[1:], f"{path.name}: {command}")
        elif len(words) > 0 and re.fullmatch(r"--[a-z-]+", words[0]):
            known = {option for name in cli.commands for option in options_of(name)}
            assert words[0] in known | FOREIGN_OPTIONS, f"{path.name}: {command}"


def options_of(name: str) -> set[str]:
    """Options of a command, and of its own commands where it is a group."""
    command = cli.commands[name]
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    parameters = [p for c in (command, *inner) for p in c.params]
    return {o for p in parameters if isinstance(p, click.Option) for o in p.opts} | {"--help"}


def check_command(words: list[str], where: str) -> None:
    if words[0] == "--version":
        return
    assert words[0] in cli.commands, where
    known = options_of(words[0])
    for word in words[1:]:
        if re.match(r"--\w", word):
            assert word.split("=")[0] in known, where


def test_the_readme_has_every_command_and_option() -> None:
    page = text_of("README.md")
    for name in cli.commands:
        assert f"`megabench {name}`" in page
        for option in options_of(name) - {"--help"}:
            assert option in page, f"{name} {option}"


def test_the_readme_stays_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 150


@every_doc
def test_every_python_snippet_compiles(path: Path) -> None:
    for snippet in snippets(path.read_text(encoding="utf-8"), "python"):
        ast.parse(snippet, filename=path.name)


# ---- docs/backends.md -------------------------------------------------------


def test_the_example_backend_runs_and_obeys_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = snippets(text_of("docs/backends.md"), "python")[0]
    assert len(example.strip().splitlines()) <= 21
    (tmp_path / "my_kernels.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    backend = get_backend("my_kernels:MyBackend")

    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    w = torch.randint(0, 0x70, (32, 64), generator=torch.Generator().manual_seed(1))
    w, sw = w.to(torch.uint8), torch.full((32, 2), 120, dtype=torch.uint8)
    got = backend.linear(x, w.view(torch.float8_e4m3fn), sw).double()
    value, bound = linear(x, w, sw)
    assert ((got - value).abs() <= bound + 2.0**-8 * value.abs()).all()

    wide = Geometry.load(ROOT / "cases" / "128-heads.config.json")
    record = load_suite("smoke").cases[0].record
    assert not backend.supports(wide, torch.device("cpu"), record).ok
    assert backend.supports(Geometry.load(), torch.device("cpu"), record).ok


def test_every_built_in_backend_is_described() -> None:
    page = text_of("docs/backends.md")
    for name in backend_specs():
        assert f"`{name}`" in page


# ---- docs/contract.md -------------------------------------------------------


def test_every_op_of_the_protocol_stands_in_the_contract() -> None:
    page = text_of("docs/contract.md").replace("…", "fused_norm_rope_attn_rope_cast")
    for name, member in vars(Backend).items():
        if callable(member) and name[0] != "_" and name not in ("supports", "prepare"):
            short = name.removeprefix("fused_norm_rope_attn_rope_cast")
            assert name in page or f"`{short}`" in page, name


def test_the_vendor_schemas_stand_in_the_contract_word_for_word() -> None:
    lines = text_of("docs/contract.md").splitlines()
    assert set(SCHEMAS.values()) <= set(lines)


def decode_arguments() -> dict[str, Any]:
    tokens = 4
    return {
        "q": torch.zeros(tokens, 64, 512, dtype=torch.bfloat16),
        "kv": torch.zeros(2, 32, 1, 528, dtype=torch.uint8),
        "indices": torch.full((tokens, 128), -1, dtype=torch.int32),
        "sm_scale": 512**-0.5,
        "d_v": 512,
        "attn_sink": None,
        "topk_length": None,
        "extra_kv": None,
        "extra_indices": None,
        "extra_topk_length": None,
        "enable_q_norm": False,
        "rms_norm_eps": 0.0,
        "token_positions": torch.zeros(tokens, dtype=torch.int32),
        "is_rope_neox_style": False,
        "rope_dim": 64,
        "cos_sin_cache": cos_sin_cache(Geometry.load(), 1, compressed=False),
        "n_wv_group": 8,
        "num_per_channels": 32,
        "use_tma_aligned_col_major_sf": True,
        "round_sf": True,
        "use_packed_ue8m0": True,
    }


OUT = torch.zeros(4, 8, 4096).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "wrong",
    [
        {"q": torch.zeros(4, 64, 512, dtype=torch.float16)},
        {"q": torch.zeros(4, 48, 512, dtype=torch.bfloat16)},
        {"rope_dim": 128},
        {"is_rope_neox_style": True},
        {"kv": torch.zeros(2, 32, 1, 288, dtype=torch.uint8)},
        {"out_fp8": OUT},
        {"out_fp8": OUT, "out_sf": torch.zeros(4, 8, 32, dtype=torch.int32)},
    ],
    ids=lambda wrong: "+".join(wrong),
)
def test_the_contract_quotes_the_message_of_each_misuse(wrong: dict[str, Any]) -> None:
    op = get_backend("torch").fused_norm_rope_attn_rope_cast_decode
    with pytest.raises(ValueError, match=r"^\w+: ") as raised:
        op(**{**decode_arguments(), **wrong})
    assert f"`{raised.value}`" in text_of("docs/contract.md")


# ---- docs/cases.md ----------------------------------------------------------


def test_the_table_of_case_files_has_their_own_numbers() -> None:
    page = text_of("docs/cases.md")
    for path in packaged_suites():
        suite = load_suite(path)
        budget = "–" if suite.token_budget is None else suite.token_budget
        row = f"| `{path.name}` | {len(suite.cases)} | {suite.num_tokens} | {budget} |"
        assert row in page, row


def test_the_example_case_file_has_the_cases_it_is_said_to_have(tmp_path: Path) -> None:
    page = text_of("docs/cases.md")
    (tmp_path / "example.yaml").write_text(snippets(page, "yaml")[0])
    stated = re.search(r"That file has (\d+) cases", page)
    assert stated is not None
    assert len(load_suite(tmp_path / "example.yaml").cases) == int(stated[1])


def test_every_axis_family_and_sink_is_documented() -> None:
    page = text_of("docs/cases.md")
    for name in (*AXES, *FAMILIES, *get_args(Sink)):
        assert f"`{name}`" in page, name


@pytest.mark.parametrize(
    "content",
    [
        "axes:\n  compres_ratio: 1\n  batch: 1q1s4k\n",
        "axes:\n  kv_cache: nvfp4\n  batch: 1q1s4k\n",
        "axes:\n  batch: [1q1s4k, 32x1]\n",
        "token_budget: 3\naxes: {batch: q4}\n",
        "axes: {batch: q4, padding_tokens: 2}\n",
    ],
)
def test_the_case_errors_quoted_are_the_real_ones(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(content)
    with pytest.raises(CaseError) as raised:
        load_suite("my.yaml")
    assert str(raised.value) in text_of("docs/cases.md").splitlines()


# ---- docs/reports.md --------------------------------------------------------


def test_every_field_of_a_result_row_is_documented() -> None:
    page = text_of("docs/reports.md").replace("[]`", "`")
    for model in vars(schema).values():
        if isinstance(model, type) and issubclass(model, BaseModel) and model is not BaseModel:
            for name in model.model_fields:
                assert f"`{name}`" in page, f"{model.__name__}.{name}"

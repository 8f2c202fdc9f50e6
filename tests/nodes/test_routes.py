"""The HTTP routes, served by aiohttp in this process, over a model folder that ComfyUI's own folder_paths lists."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from quant_loader.demo import fixtures, models, quantize
from quant_loader.demo.paths import comfyui_tree

if str(comfyui_tree()) not in sys.path:
    sys.path.insert(0, str(comfyui_tree()))
import comfy.cli_args

comfy.cli_args.args.cpu = True  # before anything of ComfyUI looks for a device
import folder_paths  # noqa: E402
from quant_loader.nodes import routes, runs  # noqa: E402

Client = TestClient[web.Request, web.Application]
SOUND, DIALECT, REFUSED = "sound.safetensors", "dialect.safetensors", "refused.safetensors"
PLAIN, NESTED, NAN = "plain.safetensors", "sub/Ünïcode 模型.safetensors", "nan.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of diffusion models beside whatever else ComfyUI lists; taken off the list again."""
    root = tmp_path_factory.mktemp("routes")
    folder = root / "diffusion_models"
    (folder / "sub").mkdir(parents=True)
    tensors = models.flux_state_dict()
    packed = quantize.quantize(tensors, "int8_row")[0]
    quantize.save(folder / SOUND, packed)
    quantize.save(folder / DIALECT, quantize.half_scale(packed, fixtures.BROKEN_LAYERS[0]))
    quantize.save(folder / REFUSED, fixtures.zeroed_markers(tensors))
    quantize.save(folder / PLAIN, tensors)
    quantize.save(folder / NESTED, packed)
    scale = f"{fixtures.BROKEN_LAYERS[0]}.weight_scale"
    quantize.save(folder / NAN, packed | {scale: torch.full_like(packed[scale], float("nan"))})
    quantize.save(root / "outside.safetensors", packed)
    paths = folder_paths.folder_names_and_paths["diffusion_models"][0]
    paths.insert(0, str(folder))
    yield folder
    paths.remove(str(folder))


def ask(work: Callable[[Client], Awaitable[Any]]) -> Any:
    """Serves the routes, runs `work` with a client, stops."""

    async def served() -> Any:
        table = web.RouteTableDef()
        routes.register(table, runs.Runs())
        application = web.Application()
        application.add_routes(table)
        async with TestClient(TestServer(application)) as client:
            return await work(client)

    return asyncio.run(served())


def get(route: str, headers: dict[str, str] | None = None, **query: str) -> tuple[int, Any, str]:
    """(status, JSON or None, ETag) of one request."""

    async def work(client: Client) -> tuple[int, Any, str]:
        async with client.get(f"/quant-loader/{route}", params=query, headers=headers or {}) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text else None, answer.headers.get("ETag", "")

    return ask(work)  # type: ignore[no-any-return]


def check(file: str, rules: str = "strict", **more: Any) -> tuple[int, Any, str]:
    return get("check", folder="diffusion_models", file=file, rules=rules, **more)


def test_a_sound_file(folder: Path) -> None:
    status, answer, tag = check(SOUND)
    assert (status, answer["verdict"], answer["files"]) == (200, "ok", [SOUND])
    assert answer["size"] == (folder / SOUND).stat().st_size
    assert 0 < answer["quantized_bytes"] < answer["size"]
    weights = sum(n * k for n, k in (layer["shape"] for layer in answer["layers"]))
    rows = sum(layer["shape"][0] for layer in answer["layers"])
    assert answer["bits_per_weight"] == pytest.approx((8 * weights + 32 * rows) / weights, abs=0.005)
    assert (answer["compatible"], answer["repairable"], answer["repair_command"]) == (None, False, None)
    assert tag.startswith('"')
    assert str(folder) not in json.dumps(answer), "paths of the server stay on the server"


def test_a_dialect_names_both_ways_out(folder: Path) -> None:
    _, answer, _ = check(DIALECT)
    assert answer["verdict"] == "refused"
    assert answer["compatible"]["verdict"] == "ok"
    assert answer["repairable"]
    assert answer["repair_command"] == 'quant-loader repair "dialect.safetensors" "dialect-repaired.safetensors"'
    assert check(DIALECT, "compatible")[1]["verdict"] == "ok"


def test_a_refused_file_without_a_way_out(folder: Path) -> None:
    _, answer, _ = check(REFUSED)
    assert answer["verdict"] == answer["compatible"]["verdict"] == "refused"
    assert (answer["repairable"], answer["repair_command"]) == (False, None)
    assert [group["count"] for group in answer["groups"] if group["severity"] == "error"] == [3]


def test_a_plain_file_has_no_bits_per_quantised_weight(folder: Path) -> None:
    _, answer, _ = check(PLAIN)
    assert (answer["verdict"], answer["bits_per_weight"], answer["quantized_bytes"]) == ("unquantized", None, 0)


def test_sub_folders_and_other_scripts(folder: Path) -> None:
    assert check(NESTED)[1]["file"] == NESTED


def test_a_nan_in_a_scale_is_still_json(folder: Path) -> None:
    status, answer, _ = check(NAN)
    assert (status, answer["verdict"]) == (200, "refused")


def test_what_json_cannot_say_becomes_words() -> None:
    assert json.loads(routes._json({"a": [float("nan"), {"b": float("-inf")}], "c": 1.5})) == {
        "a": ["nan", {"b": "-inf"}],
        "c": 1.5,
    }


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        "..\\outside.safetensors",
        "/etc/passwd",
        "sub",
        "",
        "x" * 5000,
        "sound.safetensors\x00.txt",
    ],
)
@pytest.mark.parametrize("route", ["check", "plan", "ran"])
def test_only_listed_files_can_be_reached(folder: Path, route: str, file: str) -> None:
    assert (folder.parent / "outside.safetensors").is_file(), "there is something to reach"
    status, answer, _ = get(route, folder="diffusion_models", file=file)
    assert status in (400, 404)
    assert set(answer) == {"error"}
    assert answer["error"].endswith((".", "there."))


def test_an_absolute_path_of_a_listed_file_is_not_its_name(folder: Path) -> None:
    assert check(str(folder / SOUND))[0] == 404


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ({"folder": "custom_nodes", "file": SOUND}, "folder"),
        ({"file": SOUND}, "folder"),
        ({"folder": "diffusion_models", "file": SOUND, "rules": "lax"}, "rules"),
        ({"folder": "diffusion_models"}, "file"),
    ],
)
def test_a_wrong_request_is_named(folder: Path, query: dict[str, str], word: str) -> None:
    status, answer, _ = get("check", **query)
    assert status == 400
    assert word in answer["error"]


def test_plan_groups_layers_with_a_reason(folder: Path) -> None:
    status, answer, _ = get("plan", folder="diffusion_models", file=SOUND, execution="exact")
    assert (status, answer["execution"], answer["device"]) == (200, "exact", "CPU")
    assert sum(group["count"] for group in answer["groups"]) == len(answer["layers"]) == 13
    assert all(group["reason"] and group["execution"] == "exact" for group in answer["groups"])
    assert set(answer["layers"].values()) == set(range(len(answer["groups"])))
    assert get("plan", folder="diffusion_models", file=SOUND, execution="warp")[0] == 400
    assert get("plan", folder="diffusion_models", file=REFUSED)[1]["groups"] == [], "nothing would run it"


def test_what_ran_is_asked_by_all_files_of_a_loader(folder: Path) -> None:
    async def work(client: Client) -> list[Any]:
        answers = []
        for names in ([SOUND], [SOUND, NESTED], [SOUND, "gone.safetensors"], [SOUND] * 5):
            query = [("folder", "diffusion_models"), ("execution", "exact"), *(("file", name) for name in names)]
            async with client.get("/quant-loader/ran", params=query) as answer:
                answers.append((answer.status, await answer.json()))
        return answers

    one, two, gone, five = ask(work)
    assert one == (
        200,
        {"folder": "diffusion_models", "files": [SOUND], "rules": "strict", "execution": "exact", "parts": []},
    )
    assert (two[0], two[1]["files"]) == (200, [SOUND, NESTED])
    assert gone[0] == 404
    assert "gone.safetensors" in gone[1]["error"]
    assert five[0] == 400


def test_files_lists_every_folder_as_comfyui_does(folder: Path) -> None:
    _, answer, _ = get("files")
    listed = {entry["folder"]: entry["files"] for entry in answer["folders"]}
    assert set(listed) == set(routes.FOLDERS)
    assert {SOUND, NESTED, PLAIN} <= set(listed["diffusion_models"])


def test_an_unchanged_file_answers_304_and_a_changed_one_does_not(folder: Path) -> None:
    file = folder / "touched.safetensors"
    file.write_bytes((folder / SOUND).read_bytes())
    tag = check(file.name)[2]
    status, answer, again = check(file.name, headers={"If-None-Match": tag})
    assert (status, answer, again) == (304, None, tag)
    assert check(file.name, "compatible", headers={"If-None-Match": tag})[0] == 200, "other rules, another question"
    file.write_bytes((folder / REFUSED).read_bytes())
    os.utime(file, ns=(1, 1))
    status, answer, _ = check(file.name, headers={"If-None-Match": tag})
    assert (status, answer["verdict"]) == (200, "refused")


def test_the_routes_are_read_only(folder: Path) -> None:
    async def work(client: Client) -> list[int]:
        paths = [f"/quant-loader/{route}" for route in ("check", "plan", "ran", "files")]
        return [(await client.request(method, path)).status for path in paths for method in ("POST", "PUT", "DELETE")]

    assert set(ask(work)) == {405}


def test_at_most_two_jobs_run_and_too_many_are_turned_away() -> None:
    running, most = 0, 0
    lock, release = threading.Lock(), threading.Event()

    def job() -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        release.wait(10)
        with lock:
            running -= 1
        return "done"

    async def work() -> list[Any]:
        gate = routes.Gate(running=2, waiting=3)
        jobs = [asyncio.create_task(gate.run(job)) for _ in range(5)]
        await asyncio.sleep(0.05)
        with pytest.raises(routes.RequestError, match="busy") as refused:
            await gate.run(job)
        assert refused.value.status == 503
        release.set()  # the event loop was free to come here while the jobs ran
        results = await asyncio.gather(*jobs)
        assert await gate.run(job) == "done", "the places are free again"
        return results

    assert asyncio.run(work()) == ["done"] * 5
    assert most == 2


def test_a_job_that_fails_gives_its_place_back() -> None:
    def fail() -> None:
        raise routes.RequestError(404, "gone")

    async def work() -> None:
        gate = routes.Gate(running=1, waiting=0)
        for _ in range(3):
            with pytest.raises(routes.RequestError, match="gone"):
                await gate.run(fail)
        assert await gate.run(lambda: 7) == 7

    asyncio.run(work())

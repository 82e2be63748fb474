"""What an SGLang server is sent for a prompt with images, and what its own code makes of it."""

from __future__ import annotations

import ast
import asyncio
import base64
import dataclasses
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from asyncrl.engines.sglang import images
from asyncrl.engines.sglang.client import IMAGES_AT_ONCE, Places
from asyncrl.engines.sglang.images import ImageRequests, check_vision, image_arguments
from asyncrl.engines.sglang.options import known_arguments
from asyncrl.engines.sglang.reply import Reply
from asyncrl.engines.sglang.versions import Stamps
from asyncrl.engines.sglang.weights import WeightLoader
from asyncrl.errors import ConfigError, PromptError
from asyncrl.images.store import ImageFile, digest_of
from asyncrl.messages.images import ImageRef
from tests.unit.engines.sglang.test_reply import LENGTH, body

PAD = 9
PROMPT = np.array([1, 7, PAD, PAD, PAD, PAD, 8, 2, 7, PAD, PAD, 8, 3], dtype=np.int32)


def picture(kind: str, *, grid: tuple[int, int, int], start: int) -> ImageFile:
    written = io.BytesIO()
    Image.effect_noise((24, 24), 80).convert("RGB").save(written, kind)
    data = written.getvalue()
    ref = ImageRef(digest=digest_of(data), grid=grid, start=start, num_tokens=grid[1] * grid[2] // 4)
    return ImageFile(ref=ref, data=data)


def shown() -> list[ImageFile]:
    return [picture("PNG", grid=(1, 4, 4), start=2), picture("JPEG", grid=(1, 2, 4), start=9)]


def of_sglang(file: str, name: str) -> ast.AST:
    """Return a function or class of the installed SGLang, which takes seconds to import."""
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        pytest.skip("SGLang is not installed")
    tree = ast.parse((Path(found.origin).parent / "srt" / file).read_text())
    return next(node for node in ast.walk(tree) if getattr(node, "name", "") == name)


async def test_sglang_makes_the_prompt_again_from_one_placeholder_for_each_image() -> None:
    request = await ImageRequests().show(PROMPT, shown())
    assert request["input_ids"] == [1, 7, PAD, 8, 2, 7, PAD, 8, 3]
    function = of_sglang("multimodal/processors/base_processor.py", "_expand_input_ids")
    function.decorator_list.clear()  # type: ignore[attr-defined]
    names: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + ast.unparse(function), names)
    counts = [one.ref.num_tokens for one in shown()]
    assert names["_expand_input_ids"](request["input_ids"], counts, PAD) == PROMPT.tolist()


async def test_the_request_has_fields_that_sglang_reads() -> None:
    fields = of_sglang("managers/io_struct.py", "GenerateReqInput")
    names = {ast.unparse(node.target) for node in fields.body if isinstance(node, ast.AnnAssign)}  # type: ignore[attr-defined]
    assert (await ImageRequests().show(PROMPT, shown())).keys() <= names


async def test_an_image_is_sent_as_a_png_of_its_pixels_and_never_as_a_path() -> None:
    images = shown()
    for one, text in zip(images, (await ImageRequests().show(PROMPT, images))["image_data"], strict=True):
        sent = Image.open(io.BytesIO(base64.b64decode(text, validate=True)))
        assert sent.format == "PNG"
        assert np.array_equal(np.asarray(sent), np.asarray(Image.open(io.BytesIO(one.data)).convert("RGB")))


async def test_a_placeholder_that_the_policy_sampled_is_not_shown_as_an_image() -> None:
    with pytest.raises(PromptError, match="3 placeholders for 2 images"):
        await ImageRequests().show(np.append(PROMPT, PAD), shown())
    assert await ImageRequests().show(np.append(PROMPT, PAD), []) == {}


async def test_the_answers_of_a_group_share_the_png_of_their_image(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    monkeypatch.setattr(images, "_as_png", lambda data: made.append(data) or "x" * 100)
    requests, (first, second) = ImageRequests(cache_bytes=150), shown()
    await asyncio.gather(*(requests.show(PROMPT, [first, second]) for _ in range(4)))
    assert made == [first.data, second.data]
    await requests.show(PROMPT, [second, first])  # of both, only the newest was kept
    assert made == [first.data, second.data, first.data]


async def test_an_image_that_cannot_be_read_fails_its_prompt_alone() -> None:
    requests, (first, second) = ImageRequests(), shown()
    broken = dataclasses.replace(second, data=b"none")
    with pytest.raises(PromptError, match=f"image {second.ref.digest[:12]}: its 4 bytes are no image"):
        await requests.show(PROMPT, [first, broken])
    assert len((await requests.show(PROMPT, [first, second]))["image_data"]) == 2


async def test_an_image_that_could_not_be_made_once_is_made_for_the_next_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(data: bytes) -> str:
        raise MemoryError

    requests, pictures = ImageRequests(), shown()
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(images, "_as_png", fail)
        await requests.show(PROMPT, pictures)
    assert len((await requests.show(PROMPT, pictures))["image_data"]) == 2


def test_a_prompt_that_the_server_reads_with_other_patches_fails() -> None:
    def reply() -> Reply:
        return Reply(sent_version=(0, 0), stamps=Stamps(first_version=(0, 0)), num_prompt_tokens=len(PROMPT))

    reply().take_whole(body([5], finish_reason=LENGTH, prompt_tokens=13), late_tokens=0)
    with pytest.raises(PromptError, match="read 12 tokens of a prompt of 13"):
        reply().take_whole(body([5], finish_reason=LENGTH, prompt_tokens=12), late_tokens=0)


def test_a_server_sees_images_as_the_learner_does(tmp_path: Path) -> None:
    assert image_arguments(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "image_token_id": 9}')
    assert image_arguments(tmp_path) == {}
    (tmp_path / "preprocessor_config.json").write_text("{}")
    found = image_arguments(tmp_path)
    assert found == {"disable-fast-image-processor": True, "enable-precise-embedding-interpolation": True}
    assert not known_arguments() or found.keys() <= known_arguments()


def test_a_model_whose_images_sglang_would_see_otherwise_is_refused(tmp_path: Path) -> None:
    def write(kind: str, rope: dict[str, Any], **vision: Any) -> None:
        config = {"model_type": kind, "text_config": {"rope_parameters": rope}, "vision_config": vision}
        (tmp_path / "config.json").write_text(json.dumps(config))

    write("qwen2_5_vl", {}, patch_size=4)
    with pytest.raises(ConfigError, match="patches of 14 pixels alone, and this model's have 4; use a Qwen3-VL"):
        check_vision(tmp_path)
    write("qwen3_vl", {"mrope_section": [24, 20, 20]}, patch_size=16)
    with pytest.raises(ConfigError, match='add "mrope_interleaved": true'):
        check_vision(tmp_path)
    write("qwen3_vl", {"mrope_section": [24, 20, 20], "mrope_interleaved": True}, patch_size=4)
    check_vision(tmp_path)
    write("qwen2_5_vl", {}, patch_size=14)
    check_vision(tmp_path)
    write("qwen3_5", {"mrope_section": [11, 11, 10], "mrope_interleaved": True})
    with pytest.raises(ConfigError, match=r'add "deepstack_visual_indexes": \[\] to vision_config'):
        check_vision(tmp_path)
    write("qwen3_5", {"mrope_section": [11, 11, 10], "mrope_interleaved": True}, deepstack_visual_indexes=[])
    check_vision(tmp_path)
    check_vision(tmp_path / "none")


async def turn() -> None:
    """Let all tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_server_reads_few_requests_with_images_at_once() -> None:
    places, read = Places(), []

    async def ask() -> None:
        async with places.place(has_images=True) as note_read:
            read.append(note_read)
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(ask()) for _ in range(IMAGES_AT_ONCE + 2)]
        await turn()
        assert (len(read), places.queued + places.running) == (IMAGES_AT_ONCE, IMAGES_AT_ONCE + 2)
        async with places.place():
            pass  # a request of text waits for none of them
        read[0]()
        read[0]()  # and so does each later token
        await turn()
        assert len(read) == IMAGES_AT_ONCE + 1
        asking[1].cancel()
        await turn()
        assert len(read) == IMAGES_AT_ONCE + 2
        for one in asking:
            one.cancel()
    assert places.queued + places.running == 0


async def test_a_load_pauses_a_server_once_it_has_read_the_images_that_it_was_sent() -> None:
    places, asked = Places(read_seconds=None), list[str]()

    async def post(path: str, body: object) -> dict[str, bool]:
        asked.append(path)
        return {"success": True}

    loader = WeightLoader(
        post, pause="in_place", first_version=(0, 0), stamps=Stamps(first_version=(0, 0)), places=places
    )
    loader.ranks_with_loader = 1
    async with places.place(has_images=True) as note_read, asyncio.TaskGroup() as group:
        group.create_task(loader.load_with_loader((0, 1), "", what=""))
        await turn()
        assert not asked and not places.is_open.is_set()
        note_read()
    assert asked[0] == "/pause_generation" and places.is_open.is_set()


async def test_a_load_does_not_wait_for_images_forever() -> None:
    places = Places(read_seconds=0)
    async with places.place(has_images=True):
        await places.close()
    assert not places.is_open.is_set()

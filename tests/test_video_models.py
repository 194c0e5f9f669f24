"""Models that see videos against transformers in fp32: what follows a prompt with one, whatever steps it is computed in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm46VConfig

from engines import engine_for, greedy, run, worker_for
from nanovllm_cli.engine.checked_images import Seeing, checked_images
from nanovllm_cli.errors import UsageError
from nanovllm_cli.hearing_spec import Senses
from nanovllm_cli.video_spec import Moment
from nanovllm_cli.vision_spec import Image, PlacedImage, TokenIds, Video, VisionSpec
from test_vision import GLM_TEXT, MODELS, NUMBERS, QWEN_TOWER, an_image, gemma_4s_patches, logprobs_of, opened

MODELS.setdefault("glm4.6v", Glm46VConfig(
    text_config=GLM_TEXT | {"model_type": "glm4v_text"}, image_token_id=512, tie_word_embeddings=False,
    vision_config=QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48, "image_size": 20,
                                "model_type": "glm4v_vision"},
))  # fmt: skip
APART = ["exaone4.5", "qwen3-vl", "qwen3.5", "glm4v", "glm4v, 2 of 5 experts", "glm4.6v", "smolvlm", "internvl", "gemma4",
         "gemma4, whole in windows"]  # fmt: skip
NAMES = ["qwen2-vl", "qwen2.5-vl", *APART]
VIDEO_TOKEN = 511


def token_of(vision: VisionSpec, image_token: int) -> int:
    """That stands for a video."""
    assert vision.video is not None
    return image_token if vision.video.tokens.token == vision.tokens.token else VIDEO_TOKEN


def a_video(vision: VisionSpec, count: int, times: tuple[int, ...] | None = None) -> Video:
    """Of so many images, which follow each other evenly where they share a grid."""
    assert vision.video is not None
    step, sides = vision.video.step, (4, 4) if vision.video.size.kind in ("square", "tiles") else (3, 2)
    frames = [[an_image(vision, *sides) for _ in range(step)] for _ in range(count)]
    images = [Image.of(each[0].height, each[0].width, b"".join(one.pixels for one in each), frames=step) for each in frames]
    shared = times or tuple(range(count)) if vision.video.pace is not None else ()
    return Video(tuple(images), ("",) * (count + 1), shared, 1.0)


def prompt_of(vision: VisionSpec, token: int, *parts: int | Video) -> TokenIds:
    """Random tokens, and videos, whose images lie apart where each has a grid of its own."""
    ids: list[int] = []
    images: list[PlacedImage] = []
    for part in parts:
        if isinstance(part, int):
            ids += NUMBERS.integers(2, 500, part).tolist()
            continue
        for number in range(len(part.images)):
            images.append(vision.filmed(part, number, len(ids)))
            ids += [token] * images[-1].num_tokens
            if not part.times:
                ids += NUMBERS.integers(2, 500, 2).tolist()
    return TokenIds(ids, images)


def filmed_for_transformers(model: Any, vision: VisionSpec, prompt: TokenIds, token: int) -> dict[str, torch.Tensor]:
    """Its arguments, made of the pixels by hand."""
    tower, ids = vision.tower, torch.tensor([list(prompt)])
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (vision.mean, vision.std))
    patches, grids, values = [], [], []
    for placed in prompt.images:
        image = placed.image
        assert isinstance(image, Image)
        pixels = torch.tensor(list(image.pixels), dtype=torch.float32)
        frames = (pixels.view(image.frames, image.height, image.width, 3).permute(0, 3, 1, 2) / 255 - mean) / std
        values += list(frames)
        if vision.video is None or vision.video.step == 1:
            continue
        lines, columns = image.height // tower.cell, image.width // tower.cell
        cells = frames.view(image.frames, 3, lines, tower.merge, tower.patch_size, columns, tower.merge, tower.patch_size)
        patches.append(cells.permute(2, 5, 3, 6, 1, 0, 4, 7).flatten(0, 3).flatten(1))
        grids.append([1, lines * tower.merge, columns * tower.merge])
    kind = model.config.model_type
    is_video = (ids == token).int()
    if kind == "gemma4":
        own = gemma_4s_patches(prompt, tower.patch_size)
        return {"input_ids": ids, "mm_token_type_ids": 2 * is_video, "pixel_values_videos": own["pixel_values"],
                "video_position_ids": own["image_position_ids"],
                "num_frames_per_video": torch.tensor([len(prompt.images)])}  # fmt: skip
    if kind == "smolvlm":
        return {"input_ids": ids, "pixel_values": torch.stack(values)[None]}
    if kind == "internvl":
        return {"input_ids": ids, "pixel_values": torch.stack(values)}
    if kind.startswith("glm4"):  # whose processor lets the images' token stand for frames
        return {"input_ids": ids, "pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids),
                "mm_token_type_ids": is_video}  # fmt: skip
    grid = torch.tensor([[len(grids), *grids[0][1:]]])
    seen = {"input_ids": ids, "pixel_values_videos": torch.cat(patches), "video_grid_thw": grid,
            "mm_token_type_ids": 2 * is_video}  # fmt: skip
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        seen["position_ids"] = positions_by_hand(prompt)
    if kind == "exaone4_5":
        seen.pop("mm_token_type_ids")
    return seen


def positions_by_hand(prompt: TokenIds) -> torch.Tensor:
    """[3, 1, T] of one video, as Qwen2-VL's paper and first code have it: what follows begins behind the largest. (In
    transformers 5.24 it begins behind the larger side, wherever the time is, in a prompt; and in what is drawn, as here.)"""
    first, last = prompt.images[0].start, prompt.images[-1].end
    columns = [[place] * 3 for place in range(first)]
    for placed in prompt.images:
        assert placed.moment is not None
        columns += [[first + placed.moment.time, first + i, first + j] for i in range(placed.rows) for j in range(placed.columns)]
    begin = 1 + max(map(max, columns))
    columns += [[begin + i] * 3 for i in range(len(prompt) - last)]
    return torch.tensor(columns).T[:, None]


@pytest.mark.parametrize("name", NAMES)
def test_what_follows_a_video_is_what_transformers_has(name: str, tmp_path: Path) -> None:
    model, worker, vision, image_token = opened(name, tmp_path)
    token = token_of(vision, image_token)
    prompt = prompt_of(vision, token, 5, a_video(vision, 4, (0, 3, 7, 9)), 6)
    (output,) = run(engine_for(worker), [(prompt, greedy(10, logprobs=0))])
    answer = output.outputs[0]
    assert len(answer.token_ids) == 10, "a step that fails leaves none"
    whole = TokenIds([*prompt, *answer.token_ids], prompt.images)
    with torch.inference_mode():
        logits = model(**filmed_for_transformers(model, vision, whole, token)).logits[0, len(prompt) - 1 : -1]
    assert list(answer.token_ids) == logits.argmax(-1).tolist()
    assert answer.logprobs is not None
    actual = torch.tensor([each.logprob for each in answer.logprobs])
    torch.testing.assert_close(actual, logits.log_softmax(-1).max(-1).values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_neither_steps_nor_neighbours_change_a_bit(name: str, tmp_path: Path) -> None:
    _, worker, vision, image_token = opened(name, tmp_path, num_blocks=64)
    token, video = token_of(vision, image_token), a_video(vision, 4, (0, 3, 7, 9))
    prompts = [prompt_of(vision, token, *parts) for parts in ((5, video, 6), (2, video, 3, video, 4), (9,))]
    requests = [(prompt, greedy(16, logprobs=0)) for prompt in prompts]
    alone = [run(engine_for(worker), [request])[0] for request in requests]
    few = sum(-(-len(prompt) // 16) for prompt in prompts) + 1
    settings: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 7}, {"num_blocks": few}, {"num_speculative_tokens": 3}]
    for setting in settings:
        engine = engine_for(worker, **setting)
        for _ in range(2):  # the second time finds what the first one left
            for first, again in zip(alone, run(engine, requests), strict=True):
                assert again.outputs[0].token_ids == first.outputs[0].token_ids
                assert logprobs_of(again) == logprobs_of(first)
        assert engine.stats().prefix_hit_tokens > 0
        assert (engine.stats().preemptions > 0) == ("num_blocks" in setting)


def test_frames_of_other_times_are_another_prefix(tmp_path: Path) -> None:
    """The same tokens and images, faster: no block of them is found, and those in front of them are."""
    _, worker, vision, image_token = opened("qwen2.5-vl", tmp_path)
    token, video = token_of(vision, image_token), a_video(vision, 6)
    prompt = prompt_of(vision, token, 20, video, 6)
    fast = TokenIds(prompt, [vision.filmed(video._replace(times=tuple(range(0, 18, 3))), i, placed.start)
                             for i, placed in enumerate(prompt.images)])  # fmt: skip
    engine, answers, hits = engine_for(worker), [], []
    for each in (prompt, fast, prompt):
        before = engine.stats().prefix_hit_tokens
        answers.append(logprobs_of(run(engine, [(each, greedy(4, logprobs=0))])[0]))
        hits.append(engine.stats().prefix_hit_tokens - before)
    assert hits == [0, 16, 48]
    assert answers[0] == answers[2] != answers[1]


def test_each_image_of_a_video_is_computed_once(tmp_path: Path) -> None:
    _, worker, vision, image_token = opened("qwen3-vl", tmp_path)
    assert worker.sight is not None
    token, video = token_of(vision, image_token), a_video(vision, 3)
    still = video._replace(images=(video.images[0],) * 3)
    for shown, count in ((video, 3), (video, 3), (still, 3), (a_video(vision, 1), 4)):
        run(engine_for(worker, max_num_batched_tokens=5), [(prompt_of(vision, token, 3, shown, 4), greedy(2))])
        assert worker.sight.num_computed == count


def test_videos_that_do_not_fit_their_prompt_are_refused(tmp_path: Path) -> None:
    _, worker, vision, image_token = opened("qwen2.5-vl", tmp_path)
    token, video = token_of(vision, image_token), a_video(vision, 3)
    good = prompt_of(vision, token, 4, video, 4)
    first, second, third = good.images
    one = first.image
    assert isinstance(one, Image)
    wrong: list[list[PlacedImage]] = [
        [first, second],  # without its end
        [second, first, third],
        [first._replace(moment=None), second, third],
        [first._replace(moment=Moment(1, 0)), second, third],  # which begins later
        [first, second._replace(moment=Moment(5, 0)), third],  # behind the one that follows
        [first, second, third._replace(moment=Moment(2, 9))],  # other positions than it takes
        [first, second, third._replace(moment=Moment(1 << 30, (1 << 30) + 1))],
        [first, second, third._replace(start=third.start + 1)],  # with a gap
        [first._replace(image=one._replace(frames=3)), second, third],
        [first._replace(image=one._replace(frames=1)), second, third],  # of which half is another
        [first._replace(image=Image.of(one.height, one.width, one.pixels[: len(one.pixels) // 2], frames=2)), second, third],
    ]
    engine = engine_for(worker)
    for images in wrong:
        with pytest.raises(UsageError, match="images are of a size"):
            engine.add("it", TokenIds(good, images), greedy(1))
    still = replace(vision, video=None)
    assert not still.fits(good.images, len(good))
    assert vision.fits(good.images, len(good))
    seeing = Seeing(Senses(vision), image_token, None, 1, token)
    for tokens in (list(good), [*good, token]):
        with pytest.raises(UsageError, match="stand for videos"):
            checked_images(seeing, tokens, tuple(tokens), None)
    changed = TokenIds([image_token if each == token else each for each in good], good.images)
    with pytest.raises(UsageError, match="stand for images"):
        checked_images(seeing, changed, tuple(changed), None)


def test_several_processes_see_the_same(tmp_path: Path) -> None:
    _, worker, vision, image_token = opened("qwen2.5-vl", tmp_path)
    prompt = prompt_of(vision, token_of(vision, image_token), 5, a_video(vision, 3, (0, 3, 7)), 6)
    (alone,) = run(engine_for(worker), [(prompt, greedy(8))])
    divided = worker_for(tmp_path, dtype="float32", tensor_parallel_size=2)
    try:
        (together,) = run(engine_for(divided), [(prompt, greedy(8))])
    finally:
        divided.close()
    assert together.outputs[0].token_ids == alone.outputs[0].token_ids

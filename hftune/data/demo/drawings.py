"""Images for the demo recipes, drawn by code, the same on every machine: digits, shapes and landscapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from hftune.errors import DataError

LANDSCAPE = ("sky", "sun", "hill")
SCENE = ("disc", "square", "triangle")
SHAPES = ("circle", "cross", "ring", "square", "star", "triangle")
CHAT_SHAPES = ("circle", "ring", "square", "triangle")
COLOURS = {"red": [220, 50, 40], "green": [50, 180, 70], "blue": [60, 90, 230], "yellow": [230, 210, 60]}

Stroke = list[tuple[float, float]]
Row = dict[str, Any]
Rng = np.random.RandomState


def no_such_split(split: str) -> DataError:
    """Return the error of a demo that is asked for a split that it does not have."""
    return DataError(f"This demo has no {split} split. Set task.{split}_split to null.")


def _arc(x: float, y: float, right: float, down: float, start: float, stop: float) -> Stroke:
    """Return points on an ellipse about (x, y), from angle ``start`` to ``stop``: 0 is right, 90 down, in degrees."""
    angles = [math.radians(start + (stop - start) * step / 16) for step in range(17)]
    return [(x + right * math.cos(angle), y + down * math.sin(angle)) for angle in angles]


# Ways to write the digits, as strokes in a unit square, (0, 0) at the top left.
WAYS: list[tuple[int, list[Stroke]]] = [
    (0, [_arc(0.5, 0.5, 0.3, 0.48, -90, 270)]),
    (0, [_arc(0.5, 0.5, 0.38, 0.45, -70, 290)]),
    (1, [[(0.5, 0.0), (0.5, 1.0)]]),
    (1, [[(0.25, 0.25), (0.55, 0.0), (0.55, 1.0)]]),
    (1, [[(0.3, 0.2), (0.5, 0.0), (0.5, 1.0)], [(0.25, 1.0), (0.75, 1.0)]]),
    (2, [[*_arc(0.48, 0.28, 0.32, 0.28, -170, 40), (0.15, 1.0), (0.85, 1.0)]]),
    (2, [[*_arc(0.5, 0.3, 0.3, 0.3, -150, 60), *_arc(0.3, 0.85, 0.15, 0.13, 40, -300), (0.9, 0.95)]]),
    (3, [[*_arc(0.45, 0.25, 0.3, 0.25, -150, 90), *_arc(0.45, 0.75, 0.35, 0.25, -90, 150)]]),
    (3, [[(0.2, 0.0), (0.75, 0.0), (0.45, 0.4), *_arc(0.45, 0.7, 0.33, 0.3, -80, 150)]]),
    (4, [[(0.3, 0.0), (0.15, 0.55), (0.85, 0.55)], [(0.7, 0.1), (0.65, 1.0)]]),
    (4, [[(0.65, 1.0), (0.65, 0.0), (0.1, 0.65), (0.9, 0.65)]]),
    (5, [[(0.25, 0.05), (0.22, 0.45), *_arc(0.45, 0.7, 0.35, 0.3, -110, 150)], [(0.25, 0.05), (0.8, 0.0)]]),
    (6, [[(0.65, 0.0), (0.3, 0.4), *_arc(0.5, 0.72, 0.28, 0.28, -170, 190)]]),
    (6, [[*_arc(0.75, 0.6, 0.5, 0.6, -100, -180), *_arc(0.52, 0.75, 0.27, 0.25, -180, 180)]]),
    (7, [[(0.15, 0.0), (0.85, 0.0), (0.4, 1.0)]]),
    (7, [[(0.15, 0.1), (0.85, 0.0), (0.45, 1.0)], [(0.3, 0.5), (0.8, 0.5)]]),
    (8, [_arc(0.5, 0.25, 0.25, 0.25, 90, 450), _arc(0.5, 0.75, 0.32, 0.25, -90, 270)]),
    (9, [[*_arc(0.48, 0.28, 0.28, 0.28, 0, -360), (0.7, 1.0)]]),
    (9, [[*_arc(0.5, 0.28, 0.26, 0.26, -20, -380), *_arc(0.25, 0.45, 0.5, 0.55, 0, 90)]]),
]


def _digit(rng: Rng) -> Row:
    digit, size, scale = int(rng.randint(10)), 28, 4  # drawn larger and then averaged, for smooth edges
    ways = [strokes for number, strokes in WAYS if number == digit]
    strokes = ways[rng.randint(len(ways))]
    canvas = Image.new("L", (size * scale, size * scale))
    pen, thickness = ImageDraw.Draw(canvas), int(rng.randint(6, 15))
    width, height, angle, slant = rng.uniform([9, 13, -0.25, -0.3], [16, 20, 0.25, 0.3])
    cos, sin = math.cos(angle), math.sin(angle)
    turn = np.array([[cos, -sin], [sin, cos]]) @ np.array([[width, slant * height], [0, height]])
    middle = size / 2 + rng.uniform(-2, 2, size=2)
    for stroke in strokes:
        points = np.array(stroke) - 0.5 + rng.normal(0, 0.015, size=(len(stroke), 2)) + rng.normal(0, 0.02, size=2)
        path = [tuple(point) for point in (points @ turn.T + middle) * scale]
        pen.line(path, fill=255, width=thickness)
        for x, y in (path[0], path[-1]):  # round ends
            pen.ellipse((x - thickness / 2, y - thickness / 2, x + thickness / 2, y + thickness / 2), fill=255)
    ink = np.asarray(canvas.reduce(scale), dtype=np.float32) * rng.uniform(0.6, 1.0)
    noisy = ink + rng.normal(0, 1, size=ink.shape) * rng.uniform(0, 25)
    return {"image": Image.fromarray(noisy.clip(0, 255).astype(np.uint8)), "label": digit}


def _shape(rng: Rng) -> Row:
    name = SHAPES[rng.randint(len(SHAPES))]
    width, height = (int(value) for value in rng.randint(40, 65, size=2))
    ground, colour = rng.randint(0, 90, size=3), rng.randint(130, 256, size=3)
    return {"image": _drawn_shape(rng, name, (width, height), ground.tolist(), colour.tolist()), "label": name}


def _drawn_shape(rng: Rng, name: str, size: tuple[int, int], ground: list[int], colour: list[int]) -> Image.Image:
    scale = 2  # drawn larger and then averaged, for smooth edges
    canvas = Image.new("RGB", (size[0] * scale, size[1] * scale), tuple(ground))
    radius = rng.uniform(0.28, 0.42) * min(canvas.size)
    x, y = (rng.uniform(radius, side - radius) for side in canvas.size)
    turn, pen, ink = rng.uniform(0, 2 * math.pi), ImageDraw.Draw(canvas), tuple(colour)
    if name in ("circle", "ring"):
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
        if name == "ring":
            inner = 0.55 * radius
            pen.ellipse((x - inner, y - inner, x + inner, y + inner), fill=tuple(ground))
    else:
        pen.polygon([(x + radius * a, y + radius * b) for a, b in _corners(name, turn)], fill=ink)
    pixels = np.asarray(canvas.reduce(scale), dtype=np.float32)
    noisy = pixels + rng.normal(0, 1, size=pixels.shape) * rng.uniform(0, 12)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def _chat_about_shapes(rng: Rng) -> Row:
    images, messages = [], []
    for turn in range(1 + int(rng.rand() < 0.25)):
        colour, name = list(COLOURS)[rng.randint(len(COLOURS))], CHAT_SHAPES[rng.randint(len(CHAT_SHAPES))]
        ground = rng.randint(0, 60, size=3).tolist()
        images.append(_drawn_shape(rng, name, (32, 32), ground, COLOURS[colour]))
        asked = "<image>And this?" if turn else "<image>What is this?"
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": f"A {colour} {name}."}]
    return {"messages": messages, "images": images}


def _scene(rng: Rng) -> Row:
    width, height = (4 * rng.randint(14, 19, size=2)).tolist()
    scale = 2  # drawn larger and then averaged, for smooth edges
    ground = rng.uniform(0, 110, size=3)
    canvas = Image.new("RGB", (width * scale, height * scale), tuple(ground.astype(int).tolist()))
    pen = ImageDraw.Draw(canvas)
    boxes: list[list[float]] = []
    names: list[str] = []
    for _ in range(rng.randint(1, 4)):
        name, radius = SCENE[rng.randint(len(SCENE))], rng.uniform(7, 13)
        x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
        if any(
            abs(x - left - wide / 2) < radius + wide / 2 and abs(y - top - wide / 2) < radius + wide / 2
            for left, top, wide, _ in boxes
        ):
            continue  # objects do not overlap
        ink = tuple(rng.uniform(140, 256, size=3).astype(int).tolist())
        corners = [scale * (x - radius), scale * (y - radius), scale * (x + radius), scale * (y + radius)]
        if name == "disc":
            pen.ellipse(corners, fill=ink)
        elif name == "square":
            pen.rectangle(corners, fill=ink)
        else:
            pen.polygon([(scale * x, corners[1]), (corners[2], corners[3]), (corners[0], corners[3])], fill=ink)
        boxes.append([x - radius, y - radius, 2 * radius, 2 * radius])
        names.append(name)
    return {"image": canvas.reduce(scale), "objects": {"bbox": boxes, "category": names}}


def _corners(name: str, turn: float) -> list[tuple[float, float]]:
    """Return the corners of a polygon on and within the unit circle."""
    if name == "cross":  # twelve corners, the inner four nearer to the middle
        angle, inner = 0.32, 0.32 * math.sqrt(2)
        polar = [
            corner
            for arm in range(4)
            for corner in (
                (arm * math.pi / 2 - angle, 1.0),
                (arm * math.pi / 2 + angle, 1.0),
                (arm * math.pi / 2 + math.pi / 4, inner),
            )
        ]
    else:
        points = {"square": 4, "triangle": 3, "star": 10}[name]
        polar = [(2 * math.pi * point / points, 0.42 if name == "star" and point % 2 else 1.0) for point in range(points)]
    return [(radius * math.cos(turn + angle), radius * math.sin(turn + angle)) for angle, radius in polar]


def _landscape(rng: Rng) -> Row:
    width, height = (4 * rng.randint(10, 15, size=2)).tolist()
    top, bottom = rng.uniform([60, 90, 130], [200, 220, 256]), rng.uniform([150, 120, 80], [256, 220, 200])
    share_H11 = np.linspace(0, 1, height)[:, None, None]
    sky = np.broadcast_to(top * (1 - share_H11) + bottom * share_H11, (height, width, 3))
    image = Image.fromarray(sky.astype(np.uint8))
    pen = ImageDraw.Draw(image)
    x, y, radius = rng.uniform(0, width), rng.uniform(0, height / 2), rng.uniform(3, 9)
    mask = Image.new("L", (width, height), LANDSCAPE.index("sky"))
    pens = [(pen, (255, 240, int(rng.randint(120, 220)))), (ImageDraw.Draw(mask), LANDSCAPE.index("sun"))]
    for canvas, fill in pens:
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    across = np.arange(width + 1)
    for depth in range(rng.randint(1, 4)):  # hills, one in front of the other
        base = height * (0.5 + 0.15 * depth)
        waves = [rng.uniform(1, 5) * np.sin(across / rng.uniform(5, 14) + rng.uniform(0, 6)) for _ in range(2)]
        line = base + (waves[0] + waves[1])
        colour = tuple(int(value) for value in rng.uniform([20, 70, 20], [110, 170, 90]) * (1 - 0.15 * depth))
        outline = [*zip(across.tolist(), line.tolist(), strict=True), (width, height), (0, height)]
        for (canvas, _), fill in zip(pens, (colour, LANDSCAPE.index("hill")), strict=True):
            canvas.polygon(outline, fill=fill)
    return {"image": image, "mask": mask}


def drawn(
    draw: Callable[[Rng], Row], num_train: int, num_eval: int, split: str, count: int | None = None, kind: int = 0
) -> Iterator[Row]:
    """Yield rows of a split, "train" or "eval".

    Args:
        count: number of rows; None for all.
        kind: 0 for images, 1 for sounds; each split of each kind has its own random stream.
    """
    if split not in ("train", "eval"):
        raise no_such_split(split)
    rng = Rng([kind, int(split == "eval")])
    for _ in range(count or (num_train if split == "train" else num_eval)):
        yield draw(rng)


digits = partial(drawn, _digit, 4000, 1000)
"""Digits that look handwritten: "image", grey, 28 x 28 pixels, white on black, and "label", the digit.

Size, position, slant, rotation, thickness, every point of a stroke, and noise are random.
"""
shapes = partial(drawn, _shape, 1000, 200)
"""Shapes in one of six kinds: "image", RGB, with sides of 40 to 64 pixels, and "label", the name of the kind.

Size, position, rotation, colours and noise are random.
"""
scenes = partial(drawn, _scene, 400, 60)
"""One to three objects on a dark ground: "image", RGB, with sides of 56 to 72 pixels, and "objects", their "bbox" (left, top,
width, height in pixels) and "category", of SCENE."""
landscapes = partial(drawn, _landscape, 300, 50)
"""Pictures of sky, sun and hills: "image", RGB, with sides of 40 to 56 pixels, and "mask", the places of LANDSCAPE."""
pictures = partial(drawn, lambda rng: {"image": _landscape(rng)["image"]}, 120, 24)
"""Pictures of sky, sun and hills: "image", RGB, with sides of 40 to 56 pixels."""
picture_chats = partial(drawn, _chat_about_shapes, 2400, 200)
"""Chats about drawn shapes: "messages", in which <image> stands for a picture, and "images", RGB, 32 x 32 pixels.

The answer names colour and kind of the shape; every fourth chat asks about a second picture.
"""

"""See ``torchvision``."""

from typing import NoReturn


class ImageReadMode: ...


def decode_image(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("torchvision stand-in: decode_image")


def decode_jpeg(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("torchvision stand-in: decode_jpeg")

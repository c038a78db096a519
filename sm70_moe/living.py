"""Objects that live in one process: they hold its backends, kernels and devices, so a pickle of one would lie."""

from __future__ import annotations

from typing import ClassVar, NoReturn, Self, SupportsIndex


class Living:
    """Refuses to be pickled; `instead` says what to send or keep in its place."""

    __slots__ = ()
    instead: ClassVar[str] = "settings and layer facts can be pickled; admit them again in the other process"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: cannot be pickled or copied, it belongs to this process; {self.instead}"
        )


class LivingValue(Living):
    """One that nothing changes: a copy of it is itself."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

"""A build's folder: only what the build wrote is read, and only from there."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from sm70_moe.errors import BackendError, SettingsError
from sm70_moe.kernels import build as build_module
from sm70_moe.kernels.build import build_id
from sm70_moe.kernels.build.geometry import Geometry, shipped_geometries
from sm70_moe.kernels.build.images import RECORD, Cubins
from sm70_moe.kernels.build.versions import Scope, Version
from sm70_moe.kernels.capability import Span
from sm70_moe.kernels.declared import decode
from sm70_moe.kernels.native.steps import Case, Route
from sm70_moe.machine.installed import installed_build

FIRST = Geometry(hidden=2560, intermediate=160, experts=512, top_k=10, group=32)
SCOPE = Scope(("sm_70", "sm_90"), (FIRST,))

VERSIONS = (
    Version("qpn", "sm_70", (("hidden", 2560), ("top_k", 10)), (("metadata", "4-byte"),)),
    Version("qpn", "sm_70", (("hidden", 2560), ("top_k", 10)), (("metadata", "3-byte"),)),
    Version("qpn", "sm_70", (), (("metadata", "4-byte"),)),
    Version("other", "sm_90", (), ()),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A build with four cubins in two files."""
    place = tmp_path / "build"
    place.mkdir()
    contents = {version: version.name.encode() for version in VERSIONS}
    Cubins.write(place, build_id(SCOPE), "compiler", SCOPE, contents)
    return place


def opened(folder: Path) -> Cubins:
    cubins = Cubins.open(folder)
    assert cubins is not None
    return cubins


def edit(folder: Path, **changes: object) -> None:
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps({**record, **changes}))


def test_reading(folder: Path) -> None:
    """Every cubin that is whole is read, out of one file for each source and architecture."""
    cubins = opened(folder)
    assert sorted(path.name for path in folder.iterdir()) == [RECORD, "other.sm_90.xz", "qpn.sm_70.xz"]
    assert [cubins.read(image).decode() for image in cubins.images] == [version.name for version in VERSIONS]
    assert cubins.architectures == {"sm_70", "sm_90"}


@pytest.mark.parametrize(
    ("sizes", "axes", "expected"),
    [
        ({"hidden": 2560, "top_k": 10}, {"metadata": "4-byte"}, 0),
        ({"hidden": 2560, "top_k": 10, "experts": 7}, {"metadata": "3-byte"}, 1),
        ({"hidden": 2560, "top_k": 8}, {"metadata": "4-byte"}, 2),
        ({}, {"metadata": "4-byte"}, 2),
        ({"hidden": 2560, "top_k": 8}, {"metadata": "3-byte"}, None),
        ({"hidden": 2560, "top_k": 10}, {"metadata": "2-byte"}, None),
        ({"hidden": 2560, "top_k": 10}, {"metadata": "4-byte", "order": "x"}, None),
    ],
)
def test_choosing(folder: Path, sizes: dict, axes: dict, expected: int | None) -> None:
    """The specialised version where its sizes are met, else the runtime version, else a refusal."""
    if expected is None:
        with pytest.raises(BackendError, match="no image of qpn on sm_70"):
            opened(folder).find("qpn", "sm_70", sizes, axes)
    else:
        assert opened(folder).find("qpn", "sm_70", sizes, axes).version == VERSIONS[expected]


@pytest.mark.parametrize("architecture", ["sm_72", "sm_75", "sm_90"])
def test_an_image_is_for_one_architecture(folder: Path, architecture: str) -> None:
    """No other architecture gets it, not even a later one of the same generation."""
    with pytest.raises(BackendError, match=architecture):
        opened(folder).find("qpn", architecture, {}, {"metadata": "4-byte"})


def test_architectures_of_several_sources(folder: Path) -> None:
    """A backend runs where all of its sources have images."""
    cubins = opened(folder)
    assert cubins.of_sources(["qpn"]) == {"sm_70"}
    assert cubins.of_sources(["qpn", "other"]) == frozenset()
    assert cubins.of_sources([]) == frozenset()


def test_changed_bytes_are_not_loaded(folder: Path) -> None:
    """A file whose digest differs is refused by name."""
    cubins = opened(folder)
    (folder / cubins.images[0].file).write_bytes(b"something else")
    with pytest.raises(BackendError, match=r"qpn\.sm_70\.xz: has digest"):
        cubins.read(cubins.images[0])


def test_changed_places_are_not_loaded(folder: Path) -> None:
    """Nor is one cubin taken for another: each has a digest of its own."""
    cubins = opened(folder)
    image = replace(cubins.images[0], start=1)
    with pytest.raises(BackendError, match="has digest"):
        cubins.read(image)


def test_a_file_that_is_no_archive(folder: Path) -> None:
    """Even with the digest that the record has."""
    (folder / "qpn.sm_70.xz").write_bytes(b"something else")
    edit(folder, files={"qpn.sm_70.xz": hashlib.sha256(b"something else").hexdigest()})
    cubins = opened(folder)
    with pytest.raises(BackendError, match="unpacked"):
        cubins.read(cubins.images[0])


def test_missing_file(folder: Path) -> None:
    """So is one that is gone."""
    cubins = opened(folder)
    (folder / cubins.images[0].file).unlink()
    with pytest.raises(BackendError, match="cannot be read"):
        cubins.read(cubins.images[0])


@pytest.mark.parametrize("name", ["../outside.xz", "/etc/hostname", "sub/x.xz", "..", "."])
def test_paths_that_lead_out(folder: Path, name: str) -> None:
    """A record that names another place is not followed, even with the right digest."""
    outside = folder.parent / "outside.xz"
    outside.write_bytes((folder / "qpn.sm_70.xz").read_bytes())
    edit(folder, files={name: hashlib.sha256(outside.read_bytes()).hexdigest()})
    cubins = opened(folder)
    with pytest.raises(BackendError, match="not loaded"):
        cubins.read(replace(cubins.images[0], file=name))


def test_links_are_not_followed(folder: Path) -> None:
    """A link in the folder leads nowhere, wherever it points to."""
    cubins = opened(folder)
    path = folder / cubins.images[0].file
    path.rename(folder.parent / "moved.xz")
    path.symlink_to(folder.parent / "moved.xz")
    with pytest.raises(BackendError, match="not loaded"):
        cubins.read(cubins.images[0])


def test_a_link_to_the_folder_is_resolved_once(folder: Path) -> None:
    """A folder may be named by a link; turning the link round later changes nothing."""
    link = folder.parent / "current"
    link.symlink_to(folder)
    cubins = opened(link)
    link.unlink()
    link.symlink_to("/")
    assert cubins.folder == folder
    assert cubins.read(cubins.images[0])


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"images": [{}]},
        {"images": 3},
        {"files": []},
        {"scope": {"architectures": ["sm_70"], "geometries": [{"hidden": "x"}], "tests": False}},
        {"scope": {"architectures": ["sm_70"], "geometries": [{"height": 1}], "tests": False}},
    ],
)
def test_damaged_records(folder: Path, change: dict) -> None:
    """A record of another shape is refused by name, and is a stale build to admission."""
    edit(folder, **change)
    with pytest.raises(BackendError, match=RECORD):
        Cubins.open(folder)
    build = installed_build(folder)
    assert build is not None
    assert build.id != build.expected


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"x"', "[" * 100_000, '{"schema": 1e999}', '{"schema": NaN}', "\ufeff{}"]
)
def test_records_that_are_none(folder: Path, text: str) -> None:
    """Also what is no JSON, or no object."""
    (folder / RECORD).write_text(text)
    with pytest.raises(BackendError, match=RECORD):
        Cubins.open(folder)


def test_no_build() -> None:
    """A folder without a record holds no build."""
    assert Cubins.open(Path(os.devnull)) is None
    assert Cubins.open(Path(__file__).parent) is None


def test_a_named_folder_must_hold_a_build(tmp_path: Path) -> None:
    """A setting that names a folder without one is an error, not "no build"."""
    with pytest.raises(SettingsError, match="nothing-here"):
        installed_build(tmp_path / "nothing-here")


def test_build_of_a_users_policy(folder: Path) -> None:
    """It is current as long as the installed sources are those it was made from, whatever its geometries."""
    build = installed_build(folder)
    assert build is not None
    assert build.id == build.expected
    assert build.images == {"sm_70", "sm_90"}
    assert FIRST in shipped_geometries()
    edit(folder, scope=Scope(("sm_70",), ()).record())
    stale = installed_build(folder)
    assert stale is not None
    assert stale.id != stale.expected


def test_the_packages_own_build_must_fit_the_policies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was made for other geometries than the shipped policies declare is stale."""
    monkeypatch.setattr(build_module, "INSTALLED", folder)
    own = installed_build()
    assert own is not None
    assert own.id != own.expected


def test_backends_have_the_architectures_of_their_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend without kernels in the build has none."""

    def steps(case: Case) -> tuple:
        return ()

    routes = {
        "qpn": Route(steps, decode(Span(1, 1)), ("qpn",)),
        "grouped": Route(steps, decode(Span(2, 8)), ("qpn", "gone")),
    }
    monkeypatch.setattr("sm70_moe.kernels.native.steps.STEPS", routes)
    build = installed_build(folder)
    assert build is not None
    assert [build.images_of(name) for name in ("qpn", "grouped", "indexed")] == [{"sm_70"}, set(), set()]


def test_a_file_that_unpacks_to_more_than_it_should(folder: Path) -> None:
    """610 KB of zeros, packed, are 4 GB: no more is made than the record's images have."""
    cubins = opened(folder)
    file = cubins.images[0].file
    for content, said in ((b"\0" * 100_000_000, "more than"), (b"short", "unpacks to 5 bytes")):
        packed = lzma.compress(content)
        (folder / file).write_bytes(packed)
        edit(folder, files={**cubins.files, file: hashlib.sha256(packed).hexdigest()})
        damaged = opened(folder)
        tracemalloc.start()
        with pytest.raises(BackendError, match=said):
            damaged.read(damaged.images[0])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20_000_000  # the dictionary has 8 MiB


def test_images_that_would_be_larger_than_any(folder: Path) -> None:
    """Refused before anything is unpacked."""
    record = json.loads((folder / RECORD).read_text())
    record["images"][0]["size"] = 2**40
    edit(folder, images=record["images"])
    cubins = opened(folder)
    with pytest.raises(BackendError, match="at most"):
        cubins.read(cubins.images[0])


def test_a_record_behind_a_link_is_not_read(folder: Path) -> None:
    """It lies in the folder itself, as what it speaks of."""
    (folder / RECORD).rename(folder.parent / "moved.json")
    (folder / RECORD).symlink_to(folder.parent / "moved.json")
    with pytest.raises(BackendError, match="link"):
        Cubins.open(folder)

"""Ways to damage a checkpoint's folder, and what the error says about each."""

import json
import shutil
import zlib


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(folder):
    with open(largest_file(folder / "arrays"), "r+b") as file:
        file.truncate(100)


def flip_a_bit(folder):
    path = largest_file(folder / "arrays")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove_a_file(folder):
    largest_file(folder / "arrays").unlink()


def remove_the_arrays(folder):
    shutil.rmtree(folder / "arrays")


def remove_the_manifest(folder):
    (folder / "manifest.json").unlink()


def garble_the_manifest(folder):
    (folder / "manifest.json").write_bytes(b"\xff\x00{")


def cut_the_manifest(folder):
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])


def change_the_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"num_layers": 2', '"num_layers": 3'))


def empty_the_manifest(folder):
    (folder / "manifest.json").write_text("[]")


DAMAGE = {
    truncate: "has 100 bytes, not",
    flip_a_bit: "was changed",
    remove_a_file: "is missing",
    remove_the_arrays: "is missing",
    remove_the_manifest: "manifest.json is missing",
    garble_the_manifest: "manifest.json is not a manifest",
    cut_the_manifest: "manifest.json is not a manifest",
    change_the_manifest: "manifest.json was changed",
    empty_the_manifest: "manifest.json is not a manifest",
}


def change_and_seal(folder, change):
    """Rewrites the manifest after `change(manifest)`, with a CRC-32 that matches again."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["crc32"]
    manifest = change(manifest) or manifest
    crc = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    path.write_text(json.dumps(manifest | {"crc32": crc}))

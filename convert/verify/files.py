"""Checks of the files of an artifact: present, no others that an engine would read, every byte as in the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..artifact.checksums import sha256_file
from ..artifact.format import CARD_NAME, CONFIG_NAME, WEIGHTS_NAME, freq_name
from ..artifact.manifest import MANIFEST_NAME, Manifest
from ..errors import ArtifactError
from ..files import read_object
from ..rows.paths import TORCH_SUFFIXES
from ..rows.safetensors_file import SafetensorsFile
from .findings import Doubt, Findings, join, refuse, written_otherwise

_WEIGHT_SUFFIXES = (*TORCH_SUFFIXES, ".safetensors", ".safetensors.index.json", ".bin.index.json", ".gguf")


@dataclass(frozen=True)
class FileChecks:
    """The first group: everything later builds on these files."""

    found: Findings

    def all(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Name and function of each check, in order."""
        yield "manifest", self.manifest
        yield "config.json", self.config
        yield "model.safetensors", self.weights
        yield "stray files", self.stray
        yield "file checksums", self.checksums
        yield "tensor checksums", self.tensors

    def manifest(self) -> str:
        """eagle_slim.json can be read and is of this format."""
        self.found.manifest = Manifest.load(self.found.folder)
        tool = self.found.manifest.tool
        return f"{tool.get('name')} {tool.get('version')}"

    def config(self) -> str:
        """config.json is a JSON object."""
        self.found.config = read_object(self.found.folder / CONFIG_NAME, ArtifactError, str(self.found.folder))
        return f"{len(self.found.config)} keys"

    def weights(self) -> str:
        """The safetensors header is sound and carries the metadata that loaders ask for."""
        self.found.weights = SafetensorsFile(self.found.folder / WEIGHTS_NAME)
        metadata = self.found.weights.metadata
        refuse(metadata.get("format") != "pt", f"metadata: expected format 'pt', found {dict(metadata)}")
        return f"{len(self.found.weights.tensors)} tensors, {self.found.weights.size_bytes:,} bytes"

    def stray(self) -> str:
        """No other weights lie in the folder: SafeAILab reads pytorch_model.bin before model.safetensors."""
        manifest = self.found.need_manifest()
        own = {MANIFEST_NAME, *manifest.files}
        if manifest.rank_order_ids is not None:
            own.add(freq_name(manifest.draft_vocab))
        # Git and the Hub's tools keep files of their own, all with a dot in front.
        others = sorted(
            path.name for path in self.found.folder.iterdir() if path.name not in own and not path.name.startswith(".")
        )
        weights = [name for name in others if name.endswith(_WEIGHT_SUFFIXES)]
        if weights:
            refuse(True, f"{', '.join(weights)}: some engine reads such a file instead of {WEIGHTS_NAME}; remove it")
        if others:
            raise Doubt(f"{', '.join(others)}: not written by eagle-convert, and in no engine's way")
        return "none"

    def checksums(self) -> str:
        """Every small file has the size and SHA-256 that the manifest records."""
        manifest = self.found.need_manifest()
        problems: list[str] = []
        notes: list[str] = []
        small = {name: entry for name, entry in manifest.files.items() if "sha256" in entry}
        for name, entry in small.items():
            path = self.found.folder / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != entry["size_bytes"] or sha256_file(path) != entry["sha256"]:
                # People edit a model card, and the Hub adds to it.
                (notes if name == CARD_NAME else problems).append(f"{name} is not as it was written")
        if CONFIG_NAME not in small or WEIGHTS_NAME not in manifest.files:
            problems.append(f"the manifest does not record {CONFIG_NAME} and {WEIGHTS_NAME}")
        join([*problems, *notes] if problems else [])
        return "; ".join([f"{len(small)} files", *notes])

    def tensors(self) -> str:
        """Size, header and tensors of the weights are those that the manifest records."""
        entry = self.found.need_manifest().files.get(WEIGHTS_NAME, {})
        join(written_otherwise(self.found.need_weights(), entry, self.found.digest))
        return f"header and {len(entry.get('tensors', {}))} tensors"

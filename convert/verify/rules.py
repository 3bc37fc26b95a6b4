"""Checks of the rules of the format. Each catches what at least one engine accepts silently and then gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from eagle_slim.vocab_tools.token_maps import ids_from_d2t, read_pickle
from eagle_slim.vocab_tools.vocabulary import uncounted_warning

from ..artifact.checksums import row_checksums
from ..artifact.eagle3 import layer_class
from ..artifact.format import freq_name
from ..head import names
from ..rows.dtypes import FLOATS, LONG_NAMES
from .findings import Doubt, Findings, SkipCheck, all_finite, join, refuse

_MAPS = frozenset(names.MAPS)
_HEAD_NORM = names.HEAD_NORMS["eagle3"][0]


@dataclass(frozen=True)
class RuleChecks:
    """The second group: map, rows, tensors and configuration, from the artifact alone."""

    found: Findings

    def all(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Name and function of each check, in order."""
        yield "tensor names", self.tensor_names
        yield "d2t", self.d2t
        yield "t2d", self.t2d
        yield "ranks", self.ranks
        yield "lm_head rows", self.rows
        yield "finite values", self.finite
        yield "fc.bias", self.fc_bias
        yield "config keys", self.config_keys
        yield "config sizes", self.sizes
        yield "tap layers in config", self.taps
        yield "freq_N.pt", self.freq

    def tensor_names(self) -> str:
        """Exactly the tensors of the format, under their canonical names: vLLM and LMDeploy fail on any other."""
        weights, manifest = self.found.need_weights(), self.found.need_manifest()
        table = names.canonical_names(weights.tensors, "model.safetensors")
        problems = [f"{stored} should be called {name}" for name, stored in table.stored.items() if stored != name]
        problems += [f"{name} has no place here: {reason}" for name, reason in table.dropped.items()]
        if table.kind != manifest.kind:
            problems.append(f"these are the tensors of {table.kind}, the manifest says {manifest.kind}")
        if manifest.kind != "eagle":
            wanted = {names.LM_HEAD} | (_MAPS if manifest.rank_order_ids is not None else frozenset())
            problems += [f"{name} is missing" for name in sorted(wanted - set(weights.tensors))]
            if manifest.rank_order_ids is None:
                problems += [f"{name} with a full vocabulary" for name in sorted(_MAPS & set(weights.tensors))]
        join(problems)
        return f"{len(table.stored)} tensors, {table.kind}"

    def d2t(self) -> str:
        """d2t is int64 offsets of unique, ascending ids in range: never negative, never falling."""
        manifest = self.found.need_map()
        values = self._read("d2t")
        refuse(str(values.dtype) != "int64" or values.ndim != 1, f"expected int64 [draft_vocab], found {values.dtype}")
        ids = ids_from_d2t(values, form="offset", target_vocab=manifest.target_vocab)
        steps = np.diff(ids)
        if bool((steps <= 0).any()):
            refuse(True, f"ids do not ascend: row {int(np.argmax(steps <= 0)) + 1} is below the row before it")
        self.found.ids = ids
        return f"{len(ids)} ascending ids of {manifest.target_vocab}"

    def t2d(self) -> str:
        """t2d marks exactly the ids of d2t."""
        manifest = self.found.need_map()
        mask = self._read("t2d")
        refuse(
            mask.dtype != np.bool_ or mask.shape != (manifest.target_vocab,),
            f"expected bool [{manifest.target_vocab}], found {mask.dtype} {list(mask.shape)}",
        )
        ids = self.found.need_ids()
        marked = np.flatnonzero(mask)
        refuse(not np.array_equal(marked, ids), f"marks {len(marked)} ids that are not those of d2t ({len(ids)})")
        return f"marks the same {len(ids)} ids"

    def ranks(self) -> str:
        """The manifest ranks exactly the ids of the map, forced ids first."""
        manifest = self.found.need_manifest()
        ranked = manifest.rank_order_ids
        if ranked is None:
            raise SkipCheck("a full vocabulary has no ranks")
        refuse(len(np.unique(ranked)) != len(ranked), "an id is ranked twice")
        refuse(bool(ranked.min() < 0 or ranked.max() >= manifest.target_vocab), "an id is outside the vocabulary")
        forced = {int(token_id) for token_id in (manifest.vocabulary or {}).get("forced", {})}
        refuse(
            forced != {int(token_id) for token_id in ranked[: manifest.num_forced]},
            f"the first {manifest.num_forced} ranks are not the {len(forced)} forced ids",
        )
        if manifest.kind != "eagle":
            ids = self.found.need_ids()
            refuse(not np.array_equal(np.sort(ranked), ids), "the ranked ids are not those of d2t")
        found = f"{len(ranked)} ids, {manifest.num_forced} of them forced"
        if manifest.num_uncounted is not None:
            found += f", {manifest.num_uncounted} never counted"
        assert manifest.ranks is not None
        if uncounted_warning(manifest.ranks):
            raise Doubt(found)
        return found

    def rows(self) -> str:
        """Every lm_head row has the checksum of the row that was written there."""
        manifest = self.found.need_lm_head()
        shape = self._shape(names.LM_HEAD)
        refuse(
            len(shape) != 2 or shape[0] != manifest.draft_vocab,
            f"lm_head.weight is {list(shape)}, expected {manifest.draft_vocab} rows",
        )
        refuse(manifest.row_checksums is None, "the manifest has no row checksums")
        assert manifest.row_checksums is not None
        found, expected = row_checksums(self.found.checkpoint.raw(names.LM_HEAD)), manifest.row_checksums
        changed = np.flatnonzero((found != expected).any(axis=1))
        if len(changed):
            moved = np.array_equal(np.unique(found, axis=0), np.unique(expected, axis=0))
            how = "the same rows are there in another order" if moved else "rows were changed"
            refuse(True, f"{len(changed)} rows are not as they were written, the first is row {changed[0]}: {how}")
        return f"{len(found)} rows"

    def finite(self) -> str:
        """No tensor holds NaN or infinity."""
        tensors = self.found.need_weights().tensors
        floating = [name for name in sorted(tensors) if tensors[name].dtype in FLOATS]
        checkpoint = self.found.checkpoint
        join([f"{name} holds NaN or infinity" for name in floating if not all_finite(checkpoint, name)])
        return f"{len(floating)} tensors"

    def fc_bias(self) -> str:
        """EAGLE-3 has no fc.bias (vLLM drops it silently); EAGLE-1/2 has one (SGLang leaves it random otherwise)."""
        manifest, weights = self.found.need_manifest(), self.found.need_weights()
        present = names.FC_BIAS in weights.tensors
        refuse(manifest.kind == "eagle3" and present, "an EAGLE-3 head must not have fc.bias")
        refuse(manifest.kind == "eagle" and not present, "missing: SGLang would leave its bias uninitialised")
        return "present, as SGLang needs it" if present else "absent"

    def config_keys(self) -> str:
        """Values that engines demand, and keys that mislead them."""
        manifest, config, weights = self.found.need_manifest(), self.found.need_config(), self.found.weights
        problems = []
        if "bias" in config:
            problems.append(
                "bias: must be absent, vLLM and SGLang would build attention biases and leave them uninitialised"
            )
        if manifest.kind == "eagle3":
            expected: dict[str, Any] = {
                **({} if weights is None else layer_class(_HEAD_NORM in weights.tensors, manifest.flavour)),
                "vocab_size": manifest.target_vocab,
                "draft_vocab_size": manifest.draft_vocab,
                "tie_word_embeddings": False,
                "num_hidden_layers": 1,
            }
            for key, value in expected.items():
                if config.get(key) != value or type(config.get(key)) is not type(value):
                    problems.append(f"{key}: expected {value!r}, found {config.get(key)!r}")
            if manifest.rank_order_ids is not None and not manifest.draft_vocab < manifest.target_vocab:
                problems.append(f"draft_vocab_size {manifest.draft_vocab} must be below vocab_size")
            if config.get("target_hidden_size") == config.get("hidden_size"):
                problems.append("target_hidden_size: must be absent where it equals hidden_size")
        if manifest.kind == "dflash" and config.get("draft_vocab_size") != manifest.draft_vocab:
            problems.append(
                f"draft_vocab_size: expected {manifest.draft_vocab}, found {config.get('draft_vocab_size')!r}"
            )
        join(problems)
        return f"{len(config)} keys"

    def sizes(self) -> str:
        """Shapes, dtypes and flags of config.json are those of the tensors, as for any head."""
        head = self.found.need_head("config.json")
        stated = self.found.need_config().get("torch_dtype")
        written = LONG_NAMES[head.dtype_name]
        refuse(head.kind == "eagle3" and stated != written, f"torch_dtype: the tensors are {written}, found {stated!r}")
        return f"hidden {head.hidden_size}, {written}"

    def taps(self) -> str:
        """config.json names the tap layers of the manifest."""
        manifest = self.found.need_lm_head()
        num_layers = manifest.target.get("num_hidden_layers")
        layers = self.found.need_head("config.json").taps(num_layers if isinstance(num_layers, int) else None)
        refuse(layers != manifest.tap_layers, f"config.json names {layers}, the manifest {manifest.tap_layers}")
        return "default of all engines" if layers is None else f"inputs of layers {list(layers)}"

    def freq(self) -> str:
        """The token map for SGLang and FR-Spec is a list of exactly the ranked ids."""
        manifest = self.found.need_manifest()
        if manifest.rank_order_ids is None:
            raise SkipCheck("a full vocabulary has no token map")
        path = self.found.folder / freq_name(manifest.draft_vocab)
        refuse(not path.is_file(), f"{path.name} is missing")
        value = read_pickle(path)
        refuse(
            not isinstance(value, list) or value != manifest.rank_order_ids.tolist(),
            f"{path.name}: expected the {manifest.draft_vocab} ranked ids as a list, in rank order",
        )
        return f"{path.name}: {manifest.draft_vocab} ids"

    def _read(self, name: str) -> np.ndarray[Any, Any]:
        shape = self._shape(name)
        dtype = self.found.need_weights().tensors[name].dtype
        return self.found.checkpoint.raw(name).reshape(-1).view(LONG_NAMES[dtype]).reshape(shape)

    def _shape(self, name: str) -> tuple[int, ...]:
        weights = self.found.need_weights()
        refuse(name not in weights.tensors, f"{name} is missing")
        return weights.tensors[name].shape

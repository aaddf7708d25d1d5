"""The JSON Schema of the documents that --json prints.

`TYPES` says of each object its fields ("?": may be missing) and their types: a JSON type, with a
bound where it has one ("integer>=1"), "any", another object ("@site"), or several ("string|null").
Fields may be added under the same schema_version; none is removed or changes its meaning.
Non-finite numbers are null. Times are in seconds, sizes in bytes, errors relative to float64.
"""

import re
from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]


def document() -> Schema:
    """The schema, draft 2020-12."""
    commands = [
        {
            "if": {"properties": {"command": {"const": command}}},
            "then": {"properties": {"environment": schema("@environment"),
                                    "results": schema(f"@{results}")}},
        }
        for command, results in COMMANDS.items()
    ]  # fmt: skip
    fields = {"schema_version": one_of(1), "elsa_version": "string", "command": "string",
              "environment": "object", "results": "any"}  # fmt: skip
    return schema(fields) | {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The documents that elsa prints with --json, schema_version 1",
        "allOf": commands,
        "$defs": {name: schema(each) for name, each in TYPES.items()},
    }


def schema(said: Any) -> Schema:
    """The schema of a type: a string, the fields of an object, or what the functions below give."""
    if isinstance(said, str):
        options = [_named(name) for name in said.split("|")]
        return options[0] if len(options) == 1 else {"anyOf": options}
    if set(said) & {"anyOf", "oneOf", "allOf", "enum", "items", "additionalProperties", "if"}:
        return dict(said)
    return {
        "type": "object",
        "required": [name for name in said if not name.endswith("?")],
        "properties": {name.removesuffix("?"): schema(each) for name, each in said.items()},
    }


def _named(name: str) -> Schema:
    if name.startswith("@"):
        return {"$ref": f"#/$defs/{name[1:]}"}
    kind, bound, least = re.fullmatch(r"([a-z]+)(?:(>=?)(-?\d+))?", name).groups()  # type: ignore[union-attr]
    if kind == "any":
        return {}
    bounds = {">=": "minimum", ">": "exclusiveMinimum"}
    return {"type": kind} | ({bounds[bound]: int(least)} if bound else {})


def array(each: Any, least: int = 0, most: int | None = None) -> Schema:
    """An array of `least` to `most` of a type."""
    found = {"type": "array", "items": schema(each), "minItems": least}
    return found if most is None else found | {"maxItems": most}


def mapping(each: Any, names: Sequence[str] | None = None) -> Schema:
    """An object of any names, or some of those given."""
    named = {} if names is None else {"propertyNames": {"enum": list(names)}}
    return {"type": "object", "additionalProperties": schema(each)} | named


def one_of(*values: Any) -> Schema:
    """One of some constants."""
    return {"enum": list(values)}


def either(*types: Any) -> Schema:
    """At least one of some types."""
    return {"anyOf": [schema(each) for each in types]}


def exactly_one(*types: Any) -> Schema:
    """One of some types and no other of them."""
    return {"oneOf": [schema(each) for each in types]}


def both(*types: Any) -> Schema:
    """All of some types."""
    return {"allOf": [schema(each) for each in types]}


# fmt: off
COMMANDS = {
    "inspect": "results_inspect", "inspect --all": "results_inspect_all", "list": "results_list",
    "patch": "results_patch", "check": "results_check", "doctor": "results_doctor",
    "build": "results_build", "eval": "results_eval", "help": "results_help",
    "bench attention": "results_bench", "bench models": "results_bench_models",
    "bench training": "results_bench_models", "bench linear": "results_bench_linear",
    "profile": "results_profile",
    "profile --sequence-parallel": "results_profile_sequence_parallel",
}
TYPES: dict[str, Any] = {
    "environment": {"python": "string", "platform": "string", "machine": "string",
        "cpu": "string|null", "isa": "string|null", "threads": "integer|null",
        "gpu": "string|null", "packages": mapping("string|null")},
    "model": {"given": "string", "name": "string", "source": "string", "weights": "string",
        "input_size": array("integer>=1", 3, 3), "device": "string", "dtype": one_of("fp32",
        "fp16", "bf16"), "notes": array("string"), "assumed": mapping(either("integer>=1",
        array("integer>=1")), ["heads", "window", "image_heads", "text_heads"]),
        "preprocess?": {"mean": array("number"), "std": array("number"), "crop_pct": "number",
        "interpolation": "string", "crop_mode": one_of("center", "squash", "border"),
        "assumed": array(one_of("mean", "std", "crop_pct",
        "interpolation"))}},
    "site": {"path": "string", "module_class": "string", "kind": "string",
        "num_heads": "integer|null", "head_dim": "integer|null", "query_tokens": "integer|null",
        "key_tokens": "integer|null", "extra": array("string"), "flops": "integer|null",
        "flops_share": "number|null", "patchable": "boolean", "reason": "string",
        "adapter": "string|null", "patched": "boolean"},
    "inspection": {"model_class": "string", "input_size": array("integer"),
        "total_flops": "integer|null", "sites": array("@site"), "note": "string",
        "scope?": one_of("attention", "model")},
    "patch": {"patched": array("@site"), "kept": array("@site"), "precision": "string",
        "backend": "string", "scope?": one_of("attention", "model")},
    "errors": {"max_abs": "number|null", "relative_l2": "number|null",
        "original_error": "number|null", "patched_error": "number|null", "allowed": "number|null",
        "excess": "number|null", "ok": "boolean", "reason": "string"},
    "site_check": both("@errors", {"path": "string", "largest_logit": "number|null",
        "worst_case": "string", "calls": "integer", "operator_calls": "integer",
        "drift": "object|null", "notes": array("string")}),
    "model_check": both("@errors", {"case": "string", "output": "string", "inputs": "integer",
        "top1_rows": "integer", "top1_flips": "integer", "path?": one_of("eager", "graph",
        "compile", "compile+graph")}),
    "check": {"sites": array("@site_check"), "cases": array("@model_check"), "ok": "boolean",
        "dtype": "string", "device": "string", "factor": "number|null", "stress": "boolean",
        "seconds_original": "number|null", "seconds_patched": "number|null",
        "timed_runs": "integer", "failures": array("string"), "paths?": array(one_of("eager",
        "graph", "compile", "compile+graph")), "left_out?": mapping("string"),
        "gradients?": array("@gradient_check")},
    "gradient_check": both("@errors", {"path": "string", "worst": "string",
        "worst_case": "string", "gradients": "integer", "wrong": array("string")}),
    "route": {"backend": "string", "schedule": "string", "precision": "string",
        "arithmetic": "string", "reasons": array("string")},
    "probe": {"group": "string", "name": "string", "ok": "boolean|null", "value": "string",
        "reason": "string"},
    "results_inspect": both({"model?": "@model", "inspection?": "@inspection",
        "bundle?": {"model": "any", "inputs": "any", "outputs": "any", "artefacts": "any",
        "files": "any"}}, exactly_one({"model": "any", "inspection": "any"}, {"bundle": "any"})),
    "results_patch": {"model": "@model", "dry_run": "boolean", "patch": "@patch",
        "routes": mapping("@route"), "check": "null|@check", "output": "string|null"},
    "results_check": {"model": "@model", "patch": "@patch", "routes": mapping("@route"),
        "check": "@check"},
    "results_doctor": {"probes": array("@probe")},
    "results_build": either({"path": "string", "bytes": "integer", "compiled": "boolean",
        "seconds": "number|null", "loads": "boolean", "reason": "string", "isa": "string|null",
        "cuda_library?": either({"serves": "boolean", "reason": "string"}, "null")},
        {"packs": array({"folder": "string", "arch": "integer", "kernels": "integer",
        "reused": "integer", "bytes": "integer", "calls": "integer",
        "served": "number", "left_out": mapping("string"), "seconds": "number"})}),
    "bench_case": {"name": "string", "table": "string", "batch": "integer>=1",
        "heads": "integer>=1", "queries": "integer>=1", "keys": "integer>=1",
        "head_dim": "integer>=1", "dtype": one_of("fp32", "fp16", "bf16", "fp64"),
        "mask": one_of("none", "additive"), "precisions": array("string"), "goal": "number|null",
        "quick": "boolean", "window?": "integer>=0"},
    "bench_measurement": {"contender": "string", "precision": "string|null", "seconds": "number",
        "seconds_p10": "number", "seconds_p90": "number", "samples": array("number"),
        "flops_per_second": "number", "ceiling_share": "number|null",
        "bytes_per_second": "number|null", "error": "number|null",
        "workspace_bytes": "integer|null", "host_seconds": "number|null", "ratio": "number|null",
        "ratio_p10": "number|null", "ratio_p90": "number|null", "notes": mapping("string")},
    "bench_case_result": {"case": "@bench_case", "measurements": array("@bench_measurement"),
        "best_peer": "string|null", "left_out": mapping("string"), "reached": "boolean|null",
        "wrong": array("string")},
    "trace_partition": {"backend": "string", "schedule": "string", "machine": "string",
        "queries": "integer>=1", "keys": "integer>=1", "query_tile": "integer>=1",
        "query_tiles": "integer>=1", "key_tile": "integer>=1", "key_tiles": "integer>=1",
        "splits": "integer>=1", "split_keys": "integer>=1", "chain_keys": "integer>=1",
        "programs": "integer>=1", "ahead_bytes": "integer>=0", "spans": array(array("integer>=0",
        2, 2)), "states": {"where": one_of("registers", "worker memory", "memory"),
        "form": "string", "states": "integer>=0", "written_bytes": "integer>=0",
        "read_bytes": "integer>=0", "resident_bytes": "integer>=0"},
        "tree": {"leaf_levels": "integer>=0", "chain_merges": "integer>=0",
        "tree_levels": "integer>=0", "depth": "integer>=1", "bound": "number",
        "scan_depth": "integer>=1", "scan_bound": "number"}},
    "trace": {"case": "@bench_case", "precision": "string", "partition": "@trace_partition",
        "sample": {"batch": "integer>=0", "heads": array("integer>=0"),
        "rows": array("integer>=0")}, "claims": array({"name": one_of("cover", "exact", "stable",
        "theorem 1", "kernel"), "found": "number|null", "allowed": "number|null",
        "ok": "boolean|null", "note": "string"}), "ok": "boolean"},
    "tile": {"mode": one_of("half", "split", "single", "exact"), "block_m": "integer>=1",
        "block_n": "integer>=1", "warps": "integer>=1", "stages": "integer>=1",
        "ahead": "boolean"},
    "tune_candidate": {"tile": "@tile", "partitions": "integer>=1", "shipped": "boolean",
        "seconds": "number|null", "error": "number|null", "reason": "string"},
    "tuned": {"case": "@bench_case", "precision": "string", "mode": "string",
        "gain": "number|null", "chosen": "null|@tile", "candidates": array("@tune_candidate")},
    "results_bench": exactly_one({"settings": "object", "ceilings": mapping("number"),
        "busy": "string", "cases": array("@bench_case_result"), "comparison?": "@comparison"},
        {"dry_run": one_of(True), "cases": array("@bench_case")}, {"traces": array("@trace")},
        {"tuned": array("@tuned"), "table": "string|null"}, {"dry_run": one_of(True),
        "tune": array({"case": "@bench_case", "precision": "string",
        "candidates": array("@tune_candidate")})}),
    "ratio": {"value": "number>0", "low": "number>0", "high": "number>0", "rounds": "integer>=3",
        "verdict": one_of("faster", "slower", "no difference", "unsure")},
    "profile_run": {"name": "string", "patched": "boolean", "seconds": "number>0",
        "seconds_p10": "number>0", "seconds_p90": "number>0", "spread": "number>=0",
        "samples": array("number>0", 1, 100), "images_per_second": "number>0",
        "memory_bytes": "integer|null", "host_seconds": "number|null",
        "device_seconds": "number|null", "bound": one_of("host", "device", ""),
        "joules": "number|null", "ratio": "null|@ratio", "ratio_to_best": "null|@ratio",
        "error?": "number|null", "first_seconds?": "number|null",
        "parts?": dict.fromkeys(("forward", "backward", "optimizer"), "number>=0")},
    "profile_site": {"path": "string", "module_class": "string", "kind": "string",
        "num_heads": "integer|null", "head_dim": "integer|null", "query_tokens": "integer|null",
        "key_tokens": "integer|null", "extra": array("string"), "patched": "boolean",
        "reason": "string", "seconds_before": "number>0", "seconds_after": "number>0",
        "share": "number", "ratio": "@ratio", "error": "number|null",
        "original_error": "number|null", "backend": "string", "schedule": "string",
        "precision": "string", "within?": array("string"), "flops?": "integer|null"},
    "profile": {"device": "string", "dtype": "string", "batch": "integer>=1",
        "image_size": either("null", array("integer>=1", 2, 2)), "precision": "string",
        "backend": "string", "rounds": "integer>=3", "weight_bytes": "integer>=0",
        "runs": array("@profile_run", 2), "left_out": mapping("string"),
        "best_baseline": "string", "best_patched": "string", "gain": "@ratio",
        "sites": array("@profile_site"), "cover": mapping("number"), "patched": "integer>=0",
        "kept": "integer>=0", "warnings": array("string"), "notes": array("string"),
        "wrong?": array("string")},
    "profile_point": both({"configuration": {"image_size": either("null", array("integer>=1", 2,
        2)), "batch": "integer>=1", "dtype": "string", "precision": "string"},
        "status": one_of("done", "out of memory", "not applicable"), "reason": "string",
        "profile": "null|@profile"}, {"if": {"properties": {"status": {"const": "done"}}},
        "then": {"properties": {"profile": {"type": "object"}}},
        "else": {"properties": {"profile": {"type": "null"}}}}),
    "results_profile": {"model": {"given": "string", "name": "string", "source": "string",
        "alias": "string", "pretrained": "boolean", "seed": "integer>=0", "arch": "string",
        "architecture?": "string", "weights?": "string", "weights_sha256?": "string"},
        "settings": {"baselines": array("string"), "backend": "string",
        "include": array("string"), "exclude": array("string"), "rounds": "integer>=0",
        "budget_seconds": "number", "sites": "boolean|null", "device": "string",
        "errors?": "boolean", "scope?": one_of("auto", "attention", "model"),
        "train?": "boolean"}, "complete": "boolean", "points": array("@profile_point")},
    "comparison": {"rows": array({"name": "string", "own": "number", "own_low": "number",
        "own_high": "number", "published": "number", "published_low": "number",
        "published_high": "number", "verdict": one_of("regression", "better", "same"),
        "seconds": "number|null", "published_seconds": "number|null", "note": "string"}),
        "same_machine": "boolean", "missing": array("string")},
    "bench_model": {"name": "string", "table": "string", "label": "string", "model": "string",
        "image_size": "integer>=1", "batch": "integer>=1", "dtype": "string",
        "precision": "string", "window": "integer|null", "quick": "boolean"},
    "bench_model_run": {"seconds": "number>0", "seconds_p10": "number>0",
        "seconds_p90": "number>0", "spread": "number>=0", "samples": array("number>0", 1, 100),
        "images_per_second": "number>0", "memory_bytes": "integer|null",
        "host_seconds": "number|null", "device_seconds": "number|null", "bound": one_of("host",
        "device", ""), "joules": "number|null", "ratio": "null|@ratio",
        "ratio_to_best": "null|@ratio", "contender": "string", "precision": "string|null",
        "error?": "number|null", "first_seconds?": "number|null"},
    "bench_model_result": {"case": "@bench_model", "measurements": array("@bench_model_run"),
        "best_peer": "string", "best_own": "string", "gain": "null|@ratio",
        "sites": array("integer>=0", 2, 2), "errors": either("null", array("number|null", 2, 2)),
        "wrong": array("string"), "left_out": mapping("string"), "warnings": array("string")},
    "results_bench_linear": exactly_one({"products": array({"rows": "integer",
        "channels": "integer", "columns": "integer", "seconds?": "number|null",
        "peer_seconds?": "number|null", "gain?": "number|null", "error?": "number|null",
        "peer_error?": "number|null", "reason?": "string"}), "dry_run?": one_of(True),
        "least_work?": "integer|null", "table?": "string|null"}, {"settings": "any",
        "busy": "string", "complete": "boolean", "cases": array({"case": {"name": "any",
        "table": "any", "rows": "integer", "channels": "integer", "columns": "integer",
        "dtype": "any"}, "measurements": array({"contender": "string", "precision": "string|null",
        "exact": "boolean", "seconds": "number>0", "seconds_p10": "any", "seconds_p90": "any",
        "samples": "any", "error": "number", "ratio_to_best": "null|@ratio"}), "best_peer": "any",
        "best_own": "any", "gain": "null|@ratio", "errors": either("null", array("number", 2, 2)),
        "wrong": array("string"), "left_out": mapping("string"), "warnings": "any"})}),
    "results_bench_models": exactly_one({"settings": {"baselines": array("string"),
        "rounds": "integer>=0", "budget_seconds": "number", "seed": "integer>=0",
        "backend": "string"}, "busy": "string", "complete": "boolean",
        "cases": array("@bench_model_result"), "comparison?": "@comparison"},
        {"dry_run": one_of(True), "models": array("@bench_model")}),
    "coverage": {"name": "string", "family": "string", "parameters": "integer>=0",
        "sites": "integer>=0", "patchable": "integer>=0", "kept": array({"module_class": "string",
        "reason": "string", "sites": "integer>=0", "softmax": "boolean"}),
        "verdict": one_of("agrees", "differs", "failed", "not checked", "unavailable"),
        "reason": "string", "error": "number|null", "original_error": "number|null"},
    "results_inspect_all": {"summary": {"architectures": "integer>=0", "attentive": "integer>=0",
        "complete": "integer>=0", "share": "number", "sites": "integer>=0",
        "patchable": "integer>=0", "verdicts": mapping("integer>=0")},
        "architectures": array("@coverage")},
    "evaluation": {"images": "integer>=1", "labelled": "integer>=0", "classes": "integer>=1",
        "top1_original": "integer>=0", "top1_patched": "integer>=0",
        "top5_original": "integer|null", "top5_patched": "integer|null",
        "changed": array({"index": "integer>=0", "file": "string", "label": "integer>=-1",
        "original": "integer>=0", "patched": "integer>=0", "margin": "number|null"}),
        "rate_original": "number", "rate_patched": "number", "timed_batches": "integer>=1",
        "speed?": either({"value": "number", "low": "number", "high": "number",
        "rounds": "integer>=6"}, "null")},
    "results_eval": {"model": "@model", "patch": "@patch", "routes": mapping("@route"),
        "images": "string", "classes_from": "string", "unreadable": array("string"),
        "evaluation": "@evaluation"},
    "results_list": {"counted_with": "string", "models": array({"name": "string",
        "library": one_of("timm", "open_clip", "torchvision"), "sites": "integer>=0|null",
        "patchable": "integer>=0|null", "parameters": "integer>=0|null"})},
    "results_help": {"command": "string", "text": "string"},
    "results_profile_sequence_parallel": {"model": "string", "image_size": array("integer>=1"),
        "batch_size": "integer>=1", "dtype": "string", "device": "string",
        "scaling": {"ranks": "integer>=1", "tokens": array("integer>=0"), "method": one_of("ring",
        "gather", "heads"), "why": "string", "seconds": "number",
        "seconds_one": "number|null", "speedup": "number|null", "efficiency": "number|null",
        "bytes_sent": "integer>=0", "memory": "integer>=0|null", "memory_one": "integer>=0|null",
        "difference": "number|null"}},
}
# fmt: on

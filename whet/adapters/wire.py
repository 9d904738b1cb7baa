"""The calls of a curriculum as JSON, for `serve.py` and `client.py`: docs/remote.md lists them.

Every record is an object with the names of `whet/types.py`. Traces do not travel. Arrays of `Report.signals` are
written as in a state (`curriculum/base.py`): base64, type and shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from whet import types
from whet.curriculum.base import from_json, to_json
from whet.types import fields_of, rollout_from_json, rollout_to_json, sampling_from_json

LIMIT = 16 * 2**20  # bytes of a body
SECONDS = 30.0  # for one request
CALLS = ("plan", "observe", "emit", "updated", "load_state_dict")  # numbered: they change the curriculum
QUESTIONS = ("hello", "holds", "waits", "metrics", "state_dict", "prompts")  # these do not


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def read_json(body: bytes) -> Any:
    """Parse JSON without NaN and infinity."""
    return json.loads(body, parse_constant=refuse_constant)


def request_from_json(data: Mapping[str, Any]) -> types.Request:
    return types.Request(**{**data, "sampling": sampling_from_json(data["sampling"])})


def batch_to_json(batch: types.Batch | None) -> Any:
    if batch is None:
        return None
    groups = [fields_of(g) | {"rollouts": [rollout_to_json(rollout) for rollout in g.rollouts]} for g in batch.groups]
    return fields_of(batch) | {"groups": groups}


def batch_from_json(data: Mapping[str, Any] | None) -> types.Batch | None:
    if data is None:
        return None
    groups = tuple(
        types.Group(**{**g, "rollouts": tuple(map(rollout_from_json, g["rollouts"]))}) for g in data["groups"]
    )
    return types.Batch(**{**data, "groups": groups})


def report_to_json(report: types.Report) -> dict[str, Any]:
    signals = [[*key, {name: to_json(v) for name, v in values.items()}] for key, values in report.signals.items()]
    return {"metrics": dict(report.metrics), "signals": signals}


def report_from_json(data: Mapping[str, Any]) -> types.Report:
    signals = {(g, i): {name: from_json(v) for name, v in values.items()} for g, i, values in data.get("signals", ())}
    return types.Report(metrics=data.get("metrics", {}), signals=signals)


def perform(curriculum: Any, call: str, args: Mapping[str, Any]) -> Any:
    """Make a numbered call and return its answer as JSON. Arguments that do not fit raise any error."""
    if call == "plan":
        asked = curriculum.plan(types.Clock(**args["clock"]))
        return [fields_of(request) | {"sampling": fields_of(request.sampling)} for request in asked]
    if call == "observe":
        curriculum.observe([rollout_from_json(rollout) for rollout in args["rollouts"]])
    elif call == "emit":
        return batch_to_json(curriculum.emit(types.Clock(**args["clock"])))
    elif call == "updated":
        curriculum.updated(types.Clock(**args["clock"]), report_from_json(args["report"]))
    else:
        curriculum.load_state_dict(args["state"])
    return None

"""The JSON Schema of a policy file, for editors; `policies/schema.json` holds it."""

from __future__ import annotations

import json
from typing import Any

from sm70_moe.policy.document import Policy


def policy_schema() -> dict[str, Any]:
    """Draft 2020-12. It knows keys, types and ranges; rules between keys are known to loading only."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Policy.model_json_schema(by_alias=True)}


def schema_text() -> str:
    """The schema as `policies/schema.json` holds it."""
    return json.dumps(policy_schema(), indent=2, ensure_ascii=False) + "\n"

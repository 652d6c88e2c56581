"""`doctor`: whether a storage does what trials need, in plain sentences."""

from __future__ import annotations

from ray_artifact_sync.commands.diagnosis import diagnose
from ray_artifact_sync.commands.output import NOT_RIGHT, OK, plural, print_json, say
from ray_artifact_sync.experiments import Place

_SIGNS = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}


def run_doctor(place: Place, *, as_json: bool = False) -> int:
    """Tries out the place and says what was found."""
    diagnosis = diagnose(place)
    if as_json:
        print_json(
            "doctor",
            {
                "uri": place.uri,
                "ok": diagnosis.is_right,
                "checks": [
                    {"check": finding.check, "status": finding.status, "text": finding.text}
                    for finding in diagnosis.findings
                ],
                "latency_ms": {what: round(ms, 3) for what, ms in diagnosis.latency_ms.items()},
                "versions": diagnosis.versions,
            },
        )
    else:
        for finding in diagnosis.findings:
            say(f"{_SIGNS[finding.status]} {finding.check}: {finding.text}")
        wrong = sum(finding.status == "wrong" for finding in diagnosis.findings)
        say(f"{plural(wrong, 'thing')} {'is' if wrong == 1 else 'are'} wrong." if wrong else "Nothing is wrong.")
    return OK if diagnosis.is_right else NOT_RIGHT

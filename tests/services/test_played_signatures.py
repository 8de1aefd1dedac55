"""What a valid signature is good for. Signatures are played: that of a text is the text."""

from __future__ import annotations

import pytest
from submitted_jobs import submission_by

from adaptdl_elastic.agent.service.access import DeniedError, identify
from adaptdl_elastic.rendezvous.schema.submissions import Cancellation, Submission
from adaptdl_elastic.rendezvous.services import signatures
from adaptdl_elastic.rendezvous.services.service_client import PERSON_HEADER, SIGNATURE_HEADER, TIME_HEADER
from adaptdl_elastic.rendezvous.services.signatures import People, Person, SignatureError
from adaptdl_elastic.rendezvous.services.submitted import sign_record, verify_record

PEOPLE = {name: Person(name, "ssh-ed25519 AAAA") for name in ("alice", "mallory")}
NOW, YEAR = 1_800_000_000, 365 * 86400


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(people: People, name: str, text: str, signature: str) -> Person:
        if text != signature:
            raise SignatureError("not signed")
        return people[name]

    monkeypatch.setattr(signatures, "verify", verify)


def test_a_record_counts_for_the_job_and_the_person_that_it_names() -> None:
    hers = submission_by("alice")
    good = sign_record("lab", hers, "alice", lambda text: text)
    assert verify_record("lab", PEOPLE, Submission, good, "/x/job") == hers
    with pytest.raises(SignatureError, match="was signed for job 'job'"):
        verify_record("lab", PEOPLE, Submission, good, "/x/other")
    for record in (hers, Cancellation("job", "alice")):
        forged = sign_record("lab", record, "mallory", lambda text: text)
        with pytest.raises(SignatureError, match="was signed by mallory for alice"):
            verify_record("lab", PEOPLE, type(record), forged, "/x/job")


def test_a_request_counts_for_a_quarter_of_an_hour_around_its_date() -> None:
    request = ("lab", "n1", "GET", "/v1/status", signatures.digest(b""))

    def asked(moment: int, signed: int | None = None) -> str:
        signature = signatures.request_text(*request, str(signed or moment))
        headers = {PERSON_HEADER: "alice", SIGNATURE_HEADER: signature, TIME_HEADER: str(moment)}
        return identify(None, headers, PEOPLE, request, NOW).person

    assert [asked(NOW + late) for late in (-900, 0, 900)] == ["alice"] * 3
    for moment in (NOW - YEAR, NOW - 901, NOW + 901, NOW + YEAR):
        with pytest.raises(DeniedError, match="set the clocks"):
            asked(moment)
    with pytest.raises(DeniedError, match="not signed"):
        asked(NOW, signed=NOW - YEAR)

"""What one run of the command left."""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple


@functools.cache
def schema() -> Any:
    """The validator of the documents that --json prints."""
    import json_schema
    import jsonschema

    return jsonschema.Draft202012Validator(json_schema.document())


class Answer(NamedTuple):
    """Exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    def fails(self, code: int, *words: str) -> None:
        """The run ended with `code` and one line on stderr that holds all `words`."""
        assert self.code == code, (self.code, self.out, self.err)
        if self.out:  # --json
            assert json.loads(self.out)["exit_code"] == code
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: "), self.err
        assert "Traceback" not in self.err
        assert "internal error" not in self.err
        for word in words:
            assert word in lines[0], (word, lines[0])

    def shows(self, *words: str, code: int = 0) -> str:
        """The run ended with `code`; its stdout, which holds all `words`."""
        assert self.code == code, (self.code, self.out, self.err)
        for word in words:
            assert word in self.out, (word, self.out)
        return self.out

    def document(self, code: int = 0) -> dict[str, Any]:
        """The one document on stdout, held against the schema."""
        import elsa_core

        assert self.code == code, self.err
        found: dict[str, Any] = json.loads(self.out)
        schema().validate(found)
        assert found["schema_version"] == 1
        assert found["elsa_version"] == elsa_core.__version__
        return found


Elsa = Callable[..., Answer]

"""A separate process that writes conversations by chat templates, which are untrusted programs.

A template can loop forever, allocate all memory, or overflow the stack of its process. ``tokens.encoding`` starts this
file by its path, so it imports nothing of the package. A request is a line of JSON, and so is its answer.
"""

import json
import resource
import signal
import sys
from datetime import datetime

MEMORY = 1 << 30  #: bytes of the process's address space
LONGEST = 1 << 24  #: characters of a conversation


def serve() -> None:
    """Answer each line of standard input. SIGPROF ends the process if a request computes for too long."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    templates = {}
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        try:
            source = request["template"]
            if source not in templates:
                templates = {source: compiled(source)}
            text = templates[source].render(request["values"])
            if len(text) > LONGEST:
                raise ValueError(f"it has more than {LONGEST:,} characters")
            answer = json.dumps({"text": text})
        except MemoryError:
            answer = json.dumps({"error": f"it needs more than {MEMORY:,} bytes of memory"})
        except Exception as error:
            reason = " ".join(str(error).split())[:500]
            answer = json.dumps({"error": reason or type(error).__name__})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def compiled(source):
    """Compile a template in jinja's sandbox: it cannot access unsafe attributes or change its arguments. It has the
    functions and tags that transformers provides."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message):
        raise TemplateError(message)

    class Generation(Extension):
        """``{% generation %}`` ... ``{% endgeneration %}``, which mark the assistant's text: written unchanged."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    extensions = [loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = as_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": datetime.now().strftime}
    return environment.from_string(source)


def as_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """The same as transformers' filter ``tojson``; jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    serve()

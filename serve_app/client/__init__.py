"""For Python tools on the same Ray: ask the replicas directly, with no HTTP in between.

Owns: connecting (connection.py), calls that are always cancelled when they are left (answers.py), and batches of calls
(batch.py). Must not know: how a replica answers. Works in a script on a machine of the fleet, in a Ray job and in an
actor.

    with connect() as metal:
        print(metal.generate("Say hello.").text)
        with metal.stream("Tell me a story.") as story:
            for piece in story:
                print(piece, end="")

        answers = metal.generate_many(prompts, on_progress=print)
        vectors = metal.embed(["a text", "another"])

Inside a coroutine: ``await`` the same with an ``a`` in front (``agenerate``), and ``async with metal.stream(...)`` with
``async for``.
"""

from serve_app.client.answers import Answer, AnswerStream, Ask
from serve_app.client.batch import Progress
from serve_app.client.connection import Client, connect

__all__ = ["Answer", "AnswerStream", "Ask", "Client", "Progress", "connect"]

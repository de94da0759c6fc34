"""The env server: one environment, served over HTTP from inside a sandbox. Run it as ``python -m prized_gym.server``.

The environment is only ever touched by the main thread, one request at a time; a second thread reads the sockets and
answers ``/health`` and ``/stack`` by itself, so that these work while a step runs. Nothing is kept per connection, and
nothing listens but one TCP socket, so the server goes on correctly in a forked copy of its sandbox.

| request | body | answer |
|---|---|---|
| GET /health | | JSON: ready, version, env, pid, busy_seconds; 503 until the environment is built |
| GET /stack | | the Python stack of the thread that runs the environment, as text |
| GET /spaces | | observation_space, action_space, metadata, render_mode, spec, seconds |
| POST /start | fresh | nothing |
| POST /reset_base | seed | nothing |
| POST /reset | seed, options, fresh, base | obs, info |
| POST /step | action or actions, then_reset | steps: each obs, reward, terminated, truncated, info; reset |
| POST /call | name, args, kwargs | result, or space |
| POST /set_attr | values | nothing |
| POST /reseed | seed | nothing |
| POST /render | | frame |
| POST /close | | nothing; the server ends |

Bodies are msgpack as ``prized_gym.wire.codec`` writes it, of content type ``application/msgpack``; a field is optional
unless the request makes no sense without it. ``seed`` is what ``env.reset`` is given, and for ``/reseed`` what every generator
is seeded with. ``fresh`` is what a new fork is given before anything else: ``{seed, copy, attributes}`` reseeds every
generator, calls the recipe's ``on_fork(env, copy, seed)`` and sets the attributes. ``/reset_base`` resets once in the base,
and ``base`` gives what that gave. Several ``actions`` are taken one after another until the episode ends. With ``then_reset``,
true, a step that ends the episode also resets, without seed or options.

An error is ``{error: {type, message, args, traceback, exited}}``: 400 a request that makes no sense, 404 and 405 a wrong
path or method, 415 another content type, 500 what the environment raised. What the sockets refuse is told as JSON,
``{error: message}``: 400, 411 without a length, 413 and 431 too large, 429 too many at once, 503 not ready yet.
"""

from prized_gym.server.payload import read_payload, write_payload

__all__ = ["read_payload", "write_payload"]

"""What the tests try the library with. Every base imports this package, so nothing heavy is imported here.

``spaces``: one space of each kind. ``envs``: environments that hold still to be looked at; ``walk``: to train on;
``generators``: with random state everywhere; ``faulty``: that misbehave; ``served``: for the server's wire.
``bad_server``, ``episode_server``, ``stateful_server``: programs to start in a sandbox.
``plain_driver``: a provider whose sandboxes are processes of this machine, and the engine "plain" on it; ``plain_variants``:
the same as other providers are.
"""

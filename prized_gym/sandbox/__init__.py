"""What all sandbox engines share; the next provider is one file against ``driver.py`` and ``engine.py``.

``driver``: what a provider must be able to do, and says it can. ``account``: its limits. ``engine``: a provider's bases.
``pool``: the sandboxes of one base, made by ``builder`` as ``plan`` says: ``setup``, ``bundle``, ``modules``. ``sweeping``:
what was left behind. ``base``, ``copy``: as users hold them. ``fleet``: as vector environments do, with its ``jobs``,
``rows``, ``roster`` and ``making``. ``dialer``, ``client``, ``channels``: how servers inside are asked. ``failures``: why
one failed.
"""

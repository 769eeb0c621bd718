"""Settings shared by all tests.

`pytest --hypothesis-profile=explore` searches with fresh random examples; the default profile
replays the same ones everywhere, so a red run on one machine is red on every machine.
"""

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("ci")

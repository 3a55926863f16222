"""``sglang-spec-ext bench``: where does speculation stop paying on this machine?

One run, in the order of the code::

    command.py     options                        -> a Plan
    sweep.py       for each boot, for each variant:
      variants.py    base command line            -> this variant's command line and environment
      server.py      boot it, wait, stop it; diagnosis.py: why it died
      client.py      C requests in flight         -> one Trace per request
      server_log.py  the server's own log lines   -> decode throughput, graphs, admission, switches
      figures.py     traces + log lines           -> one Level
      results.py     Level                        -> JSON, after every level
    crossover.py   levels of `off` and `on`       -> the recommended threshold N, or why not
    report.py, render.py, chart.py                -> tables and chart, also later from the JSON

Only ``server.py``, ``client.py``, ``sweep.py`` and ``command.py`` touch servers. matplotlib is
imported only to draw: where it is missing, the JSON is kept and drawn elsewhere.
"""

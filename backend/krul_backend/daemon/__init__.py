"""The process that owns a host's store, and outlives the engines that use it.

``client`` is what an engine holds, ``protocol`` what goes over the wire, ``server`` what answers, ``cli``
what an operator types.
"""

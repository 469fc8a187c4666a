"""The part of an offset store that a query uses: registration, plans, and transactions over several partitions."""

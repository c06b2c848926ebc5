"""The bytes on disk: names, records, manifests, chunks. No I/O."""

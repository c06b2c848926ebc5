"""All I/O: directories, object stores, databases. The only importer of TensorStore."""

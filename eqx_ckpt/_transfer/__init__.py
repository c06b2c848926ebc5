"""Between host memory and devices."""

"""One server for several models: a process for each, loaded on request, and a process that passes requests on."""

"""A make-believe accelerator: mistakes and costs of a device that this machine lacks, found and counted on a CPU."""

"""Place of the decode megakernel; until it is there, `dsv2mk.runner.reference` decodes."""

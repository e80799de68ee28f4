"""Which collectives may run beside compute, parameter by parameter: `overlap=`."""

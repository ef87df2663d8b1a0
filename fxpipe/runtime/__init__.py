"""What runs on the cluster: transports, engines and the executor of rank programs."""

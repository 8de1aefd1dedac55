"""torchrun's options as a table, with what each one means here.

torchrun's own parser is not used, because `import torch` takes seconds and a typing error should be answered
at once. The table has the options of every release of torch that is supported. A test compares it with
torchrun's parser of the installed torch. `run_parser` says how an option is declared.
"""

HONOURED = {
    "--nnodes TEXT=1:1": "nodes of the job: N or MIN:MAX (default 1)",
    "--nproc-per-node TEXT=1": "replicas on this node: N, or MIN:MAX between which their number is chosen; "
    "auto, gpu and cpu stand for as many as there are (default 1)",
    "--rdzv-endpoint TEXT=": "etcd of the cluster, HOST:PORT[,HOST:PORT...] (default: ADAPTDL_ETCD)",
    "--rdzv-id TEXT=none": "name of the job (default: that of the script)",
    "--standalone": "one node, without an etcd (the default where no other node and no etcd is named)",
    "--max-restarts N=3": "restart the job from its checkpoint after a failure, at most N times (default 3; "
    "fewer if the same error comes twice after the same step); lost nodes, and deaths that other replicas "
    "survive, do not count",
    "--role TEXT=default": "set as ROLE_NAME for every replica",
    "-m --module": "take SCRIPT as the name of a module, as 'python -m' does",
    "--no-python": "execute SCRIPT as a program, without 'python' before it",
    "--run-path": "run the script with runpy.run_path, which is always done; overrides --no-python",
    "--log-dir TEXT": "directory for the logs of replicas",
    "-r --redirects TEXT=0": "write output of replicas to files in the log directory only: 1 is stdout, 2 "
    "stderr and 3 both, for all replicas or by local rank, as in 0:1,1:2",
    "-t --tee TEXT=0": "write output to files in the log directory and show it as well (see --redirects)",
    "--local-ranks-filter TEXT=": "show the output of these local ranks only, as in 0,1,2; files have all",
    "--master-addr TEXT=127.0.0.1": "address at which replicas meet, for scripts that name it "
    "(init_method=tcp://ADDR:PORT); only its own node can keep a store there (default: the address of the "
    "node of rank 0)",
    "--master-port N": "port at which replicas meet, for scripts that name it (default: any free one, or "
    "within --port-range; 29500 where several nodes are given a --master-addr)",
    "--local-addr TEXT": "address at which other nodes reach this one (default: that of the route to etcd)",
    "--signals-to-handle TEXT=SIGTERM,SIGINT,SIGHUP,SIGQUIT": "signals, separated by commas, at "
    "which the job saves a checkpoint and stops, the second time at once (default "
    "SIGTERM,SIGINT,SIGHUP,SIGQUIT); Slurm's --signal=USR1@120 needs SIGUSR1",
    "--virtual-local-rank": "set LOCAL_RANK=0 for every replica, which sees only its own GPU",
    "--log-line-prefix-template TEXT": "template of the prefix of each line that a replica prints",
}
"""Options that have an effect, and their help. The default of --max-restarts alone is not torchrun's: 0."""

_NO_FILTERS = "lines are not filtered by words; see --tee and --local-ranks-filter"
WITHOUT_MEANING = {
    "--rdzv-backend TEXT": "plans come from the coordinator, through etcd",
    "--rdzv-conf TEXT": "torch's rendezvous is not used; --etcd-timeout and --rescale-timeout are what it "
    "would set",
    "--monitor-interval S": "the agent waits for events and does not poll",
    "--start-method {spawn,fork,forkserver}": "replicas are forked from a warm server, or executed with "
    "--no-python",
    "--event-log-handler TEXT": "--event-log and `adaptdl events` have what happened",
    "--duplicate-stdout-filters TEXT": _NO_FILTERS,
    "--duplicate-stderr-filters TEXT": _NO_FILTERS,
    "--node-rank N": "the coordinator gives out ranks",
    "--logs-specs TEXT": "logs are written as --log-dir, --redirects and --tee say",
    "--numa-binding {node,socket,exclusive,core-complex}": "replicas are not bound to CPUs",
    "--shutdown-timeout N": "--checkpoint-timeout says how long a stop may take",
}
"""Options that have no effect here, and why."""

"""Reads attention kernels' machine code without a GPU: `benchmarks/sass_report.py` prints what is found here.

    build.py        instantiation files -> cubins, cached
    disassembly.py  cubin -> instructions with the compiler's own stall counts and scoreboards
    loops.py        instructions -> control flow, loops, the trips round a loop
    costs.py        instructions -> what each unit of a multiprocessor has to do, and cycles of one warp
    conflicts.py    bank conflicts of shared-memory accesses
    kernel.py       one kernel: resources, its main loop
    gpus.py         datasheet figures of a few GPUs
    roofline.py     kernels + a problem + a GPU -> predicted time, and which unit limits it
    gates.py        what must hold, and FlashAttention-2's figures (baselines.json) to stand beside

docs/machine_code.md says what the words and figures mean and how far to trust them.
"""

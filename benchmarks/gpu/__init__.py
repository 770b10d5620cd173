"""Parts of gpu_check.py: cases.py what is measured and how it is shown, measure.py the measuring process,
watch.py the process that starts it, watches it and runs the tests.
"""

/* What a test may call in libmetal_standin.so besides Metal itself (README.md). */
#ifndef METAL_STANDIN_PUBLIC_H
#define METAL_STANDIN_PUBLIC_H

/* Makes the n-th next operation of a kind fail (n < 0: all from the |n|-th on; 0: none):
 * "alloc", "queue", "compile", "pipeline", "command_buffer", "encoder" give nil; "archive": it is
 * not made, takes nothing, or is not written; "run" ends a command buffer with an error and nothing
 * done, "partial" with half of its groups run, "wait" with everything run; "lost" ends it and every
 * later one of the process with an error, until it is set anew. */
__attribute__((visibility("default"))) void metal_standin_fail(const char *kind, long n);

/* "objects_live" (what the host owns: 0 when nothing leaks), "buffers_live" and "bytes_live"
 * (memory, also held by pending work), "buffers_made", "no_copy", "command_buffers" (committed),
 * "dispatches", "blits", "compiles" (newLibraryWithSource), "clang_runs" (of those, not found in
 * the cache), "code_compiled" (functions compiled to machine code), "archives_written", "faults"
 * (that struck). */
__attribute__((visibility("default"))) long metal_standin_counter(const char *name);

#endif

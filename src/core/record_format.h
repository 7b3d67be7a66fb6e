/* What writing and reading a record share. */
#ifndef ORCH_RECORD_FORMAT_H
#define ORCH_RECORD_FORMAT_H

#include <orchard/core.h>

/* As PNG's: a byte that is no text, the name, and line ends that a text transfer would change. */
#define ORCH_FORMAT_MAGIC_BYTES 8
extern const unsigned char orch_format_magic[ORCH_FORMAT_MAGIC_BYTES];

/* So many tensors or more stand as a number of 4 bytes behind this byte. */
#define ORCH_RECORD_MANY 255

/* Copies all elements from one view to another of the same dtype and sizes; a dimension that both
 * repeat is copied once. */
void orch_format_copy(void *to_data, const orchard_tensor *to, const void *from_data,
                      const orchard_tensor *from);

/* Elements between this machine's order of bytes and the file's: nothing where it is the same. */
void orch_format_swap(void *data, size_t element, uint64_t bytes);

#endif

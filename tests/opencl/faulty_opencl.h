/* How a test speaks to the faulty OpenCL library: found by dlsym in the library it opened. */
#ifndef ORCHARD_FAULTY_OPENCL_H
#define ORCHARD_FAULTY_OPENCL_H

void faulty_opencl_fail(const char *family, int n);
int faulty_opencl_calls(const char *family);
int faulty_opencl_live(const char *object);

#endif

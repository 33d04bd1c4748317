// Calls one function of a library on memory that a file describes, and writes that memory back: what runs under emulation for
// tests/support/emulated_arm.py.
//
//     native_call LIBRARY FILE
//
// FILE, all int64 unless said: counts of buffers, of addresses within them and of arguments; the name of the function [32
// bytes]; the size of each buffer; of each address its buffer, its place there, and the buffer that it is of; of each argument
// whether it is a buffer, and its number or value; then what the buffers hold. Afterwards FILE is the result, and the buffers.

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

static FILE* file;

static int64_t number() {
    int64_t value;
    if (fread(&value, 8, 1, file) != 1) exit(3);
    return value;
}

int main(int, char** given) {
    void* library = dlopen(given[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 2;
    file = fopen(given[2], "rb");
    const int64_t buffers = number(), addresses = number(), arguments = number();
    char name[32];
    if (fread(name, sizeof name, 1, file) != 1) return 3;
    std::vector<int64_t> sizes, places, values;
    for (int64_t i = 0; i < buffers; i++) sizes.push_back(number());
    for (int64_t i = 0; i < 3 * addresses; i++) places.push_back(number());
    for (int64_t i = 0; i < 2 * arguments; i++) values.push_back(number());
    std::vector<char*> at;
    for (const int64_t size : sizes) {  // aligned as our own code aligns what it holds; what lies behind may be prefetched only
        at.push_back(static_cast<char*>(aligned_alloc(64, size_t(size + 127) & ~size_t(63))));
        if (size && fread(at.back(), size_t(size), 1, file) != 1) return 3;
    }
    fclose(file);
    for (size_t i = 0; i < places.size(); i += 3) memcpy(at[size_t(places[i])] + places[i + 1], &at[size_t(places[i + 2])], 8);
    if (arguments > 9) return 2;
    int64_t a[9] = {};
    for (size_t i = 0; i < size_t(arguments); i++) a[i] = values[2 * i] ? int64_t(at[size_t(values[2 * i + 1])]) : values[2 * i + 1];
    typedef int64_t Called(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
    Called* called = reinterpret_cast<Called*>(dlsym(library, name));
    if (!called) return fprintf(stderr, "%s: no such function\n", name), 2;
    const int64_t result = called(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]);
    file = fopen(given[2], "wb");
    fwrite(&result, 8, 1, file);
    for (size_t i = 0; i < at.size(); i++) fwrite(at[i], size_t(sizes[i]), 1, file);
    return fclose(file);
}

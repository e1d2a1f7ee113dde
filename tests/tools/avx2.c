/* For LD_PRELOAD: libraries see a CPU with AVX2, and without AVX-512, AMX, AVX-VNNI and what came with them.
 *
 * Libraries that choose code by CPUID (OpenVINO, oneDNN, ONNX Runtime, PyTorch, NumPy) have limits of their own in part:
 * ONEDNN_MAX_CPU_ISA limits oneDNN, and not the code that OpenVINO generates beside it. Here the kernel makes CPUID raise
 * SIGSEGV (arch_prctl(ARCH_SET_CPUID), Linux on x86-64, where /proc/cpuinfo has `cpuid_fault`). The handler runs the
 * instruction, clears the bits, and goes on behind it. Threads and forks inherit that; a program that is started takes it
 * over by LD_PRELOAD. The dynamic loader has chosen the C library's own functions before.
 *
 * Ends the process with status 99 where the kernel or the CPU cannot do that. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARCH_SET_CPUID = 0x1012, CANNOT = 99 };

/* Bits of CPUID leaf 7: https://en.wikipedia.org/wiki/CPUID */
static const unsigned EBX_7 = 1u << 16 /* F */ | 1u << 17 /* DQ */ | 1u << 21 /* IFMA */ | 1u << 26 /* PF */ |
                              1u << 27 /* ER */ | 1u << 28 /* CD */ | 1u << 30 /* BW */ | 1u << 31 /* VL */;
static const unsigned ECX_7 = 1u << 1 /* VBMI */ | 1u << 6 /* VBMI2 */ | 1u << 8 /* GFNI */ | 1u << 9 /* VAES */ |
                              1u << 10 /* VPCLMULQDQ */ | 1u << 11 /* VNNI */ | 1u << 12 /* BITALG */ |
                              1u << 14 /* VPOPCNTDQ */;
static const unsigned EDX_7 = 1u << 2 /* 4VNNIW */ | 1u << 3 /* 4FMAPS */ | 1u << 8 /* VP2INTERSECT */ |
                              1u << 22 /* AMX-BF16 */ | 1u << 23 /* FP16 */ | 1u << 24 /* AMX-TILE */ |
                              1u << 25 /* AMX-INT8 */;
static const unsigned EAX_7_1 = 1u << 4 /* AVX-VNNI */ | 1u << 5 /* BF16 */ | 1u << 21 /* AMX-FP16 */ |
                                1u << 23 /* AVX-IFMA */;

static int (*system_sigaction)(int, const struct sigaction *, struct sigaction *);
static struct sigaction theirs; /* what the program wants to happen at SIGSEGV */

/* No library call: it runs in the handler, and where CPUID may raise the signal. */
static long let_cpuid(long allowed) {
    long result = SYS_arch_prctl;
    __asm__ volatile("syscall" : "+a"(result) : "D"(ARCH_SET_CPUID), "S"(allowed) : "rcx", "r11", "memory");
    return result;
}

static void answer_cpuid(greg_t *registers) {
    const unsigned leaf = registers[REG_RAX], subleaf = registers[REG_RCX];
    unsigned a = leaf, b, c = subleaf, d;
    let_cpuid(1);
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    let_cpuid(0);
    if (leaf == 7 && subleaf == 0) {
        b &= ~EBX_7;
        c &= ~ECX_7;
        d &= ~EDX_7;
    } else if (leaf == 7 && subleaf == 1) {
        a &= ~EAX_7_1;
        d = 0; /* AVX-VNNI-INT8, AVX10 and later ones */
    } else if (leaf == 13 && subleaf == 0) {
        a &= 7; /* states of x87, SSE and AVX */
    }
    registers[REG_RAX] = a;
    registers[REG_RBX] = b;
    registers[REG_RCX] = c;
    registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

static void on_fault(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)registers[REG_RIP];
    if (info->si_code == SI_KERNEL && code[0] == 0x0f && code[1] == 0xa2) {
        answer_cpuid(registers);
    } else if (theirs.sa_flags & SA_SIGINFO) {
        theirs.sa_sigaction(number, info, context);
    } else if (theirs.sa_handler != SIG_DFL && theirs.sa_handler != SIG_IGN) {
        theirs.sa_handler(number);
    } else {
        system_sigaction(SIGSEGV, &theirs, 0); /* the instruction runs again, and the kernel ends the process */
    }
}

/* The program's handlers of SIGSEGV, such as faulthandler's, are called for its own faults. */
int sigaction(int number, const struct sigaction *wanted, struct sigaction *before) {
    if (!system_sigaction) system_sigaction = dlsym(RTLD_NEXT, "sigaction");
    if (number != SIGSEGV) return system_sigaction(number, wanted, before);
    if (before) *before = theirs;
    if (wanted) theirs = *wanted;
    return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction wanted = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
    return sigaction(number, &wanted, &before) ? SIG_ERR : before.sa_handler;
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    if (!system_sigaction) system_sigaction = dlsym(RTLD_NEXT, "sigaction");
    system_sigaction(SIGSEGV, &ours, 0);
    if (let_cpuid(0)) _exit(CANNOT);
}

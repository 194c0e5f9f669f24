// emulation_switch(save, to): saves the stack pointer and the registers that a function must keep (System V ABI, x86-64), and
// goes on where the stack `to` was left.
asm(R"(
.pushsection .text
.globl emulation_switch
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.popsection
.pushsection .note.GNU-stack,"",@progbits
.popsection
)");
